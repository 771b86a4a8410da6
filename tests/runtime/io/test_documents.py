"""A few hundred bytes of YAML or JSON become neither gigabytes nor hours; what people write is read as by PyYAML and json."""

from __future__ import annotations

import json
import textwrap

import pytest
import yaml
from huggingface_hub import DatasetCard

from megascend.apps.data.splits import card_configs
from megascend.config.documents import load_json, load_yaml
from megascend.config.run_file import _parse
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.files import read_config

LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
HOSTILE = {
    "lists": LAUGHS,
    "merges": MERGES,
    "inside itself": "a: &a [*a]\n",
    "digits": "a: " + 600 * "9",
    "digits with underscores": "a: 1" + 600 * "_0",
    "65 bits": f"a: {2**64}",
    "hexadecimal": "a: 0x" + 600 * "f",
    "binary": "a: 0b" + 65 * "1",
    "base 60": "a: 1" + 300 * ":1",
    "base 60, a fraction": "a: 1" + 300 * ":1" + ".5",
    "digits of a fraction": "a: 0." + 600 * "3",
    "depth": "a: " + 1_000 * "[",
    "tag": "a: !!python/object/apply:os.mkdir [pwned]",
}


@pytest.mark.parametrize("form", HOSTILE)
def test_hostile_yaml_is_refused_wherever_it_is_read(form, tmp_path):
    text = HOSTILE[form]
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)
    for source, in_file in (("run.yaml", True), ("--set a", False)):
        with pytest.raises(ConfigError, match="not valid YAML") as raised:
            _parse(text, source, in_file=in_file)
        assert len(str(raised.value)) < 300
    (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")
    with pytest.raises(yaml.YAMLError):
        card_configs(tmp_path)


ORDINARY = """
    base: &base {lr: 1.0e-3, steps: 1_000, layers: &layers [1, 2, 3]}
    run: {<<: *base, steps: 20, mask: 0xff, span: 1:30, seed: 18446744073709551615, other: *layers}
    when: 2026-11-29
    many: [*base, *base, *base]
"""


def test_ordinary_yaml_is_read_as_by_pyyaml():
    text = textwrap.dedent(ORDINARY)
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_yaml("") is None
    assert len(load_yaml("[" + 50_000 * "1," + "]")) == 50_000


def test_card_is_read_as_by_the_hub(tmp_path):
    card = "---\nlicense: mit\nconfigs:\n- config_name: a\n  data_files: x.jsonl\n- config_name: b\n---\n# Title\n---\n"
    (tmp_path / "README.md").write_text(card)
    configs = DatasetCard(card).data.to_dict()["configs"]
    assert card_configs(tmp_path) == {entry["config_name"]: entry for entry in configs}


@pytest.mark.parametrize(
    "text", ['{"a": 1%s}' % (600 * "0"), '{"a": -1%s}' % (60 * "0"), 10_000 * "[", '{"a": 1%s}' % (9000 * "0")]
)
def test_hostile_json_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match=r"digits|deeply"):
        load_json(text)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)


def test_ordinary_json_is_read_as_by_json():
    text = json.dumps({"model_max_length": int(1e30), "a": [1.5, None, -7]})
    assert load_json(text) == load_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize("section", [None, "text_config"])
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_experts", "n_routed_experts", "num_attention_heads"])
def test_sizes_that_no_model_has_are_refused(field, section, tmp_path):
    values = {field: 10**9}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **({section: values} if section else values)})
    )
    with pytest.raises(CheckpointError, match=f"{field} is 1000000000"):
        read_config(tmp_path)

"""Which entries of a journal still count, and which saved adapters they need. Pure.

Kinds of entries (each with the names that it is about in ``values``):

    session     a session was opened                          end       it has ended, and with it all that is its own
    sampler     a session has a sampler
    sequence    a response of a session is remembered             forget    it is not any more
    model       a model was asked for; the body is the request    unload    it is gone
    request     a model's request; the body is the request
    answer      what became of a request that is not to be done again
    save        a model's state was saved, as it was after all requests before number ``following``: these are not done again
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megascend.errors import CheckpointError
from megascend.serve.journal import Entry, Place


@dataclass(frozen=True)
class Kept:
    """An entry and where its body is."""

    entry: Entry
    place: Place


@dataclass
class KeptModel:
    """A model's entries.

    Attributes:
        made: the request that it began with.
        save: its last save, if there is one.
        requests: by name, in the order they came: those that no save covers.
        answers: likewise: of requests that are not to be done again.
    """

    made: Kept
    save: Kept | None = None
    requests: dict[str, Kept] = field(default_factory=dict)
    answers: dict[str, Kept] = field(default_factory=dict)

    @property
    def directory(self) -> str | None:
        """The directory of its last save."""
        return None if self.save is None else self.save.entry.values["directory"]


@dataclass
class Ledger:
    """What entries add up to, in the order they came."""

    sessions: dict[str, Kept] = field(default_factory=dict)
    samplers: dict[str, Kept] = field(default_factory=dict)
    sequences: dict[str, Kept] = field(default_factory=dict)
    models: dict[str, KeptModel] = field(default_factory=dict)

    def add(self, entry: Entry, place: Place) -> list[str]:
        """Take an entry; directories of saves that are not needed any more.

        Raises:
            CheckpointError: there is no such kind.
        """
        kept, values = Kept(replace(entry, body=b""), place), entry.values
        if entry.kind == "session":
            self.sessions[values["session"]] = kept
        elif entry.kind == "sampler":
            if values["session"] in self.sessions:
                self.samplers[values["sampler"]] = kept
        elif entry.kind == "sequence":
            if values["session"] in self.sessions:
                self.sequences[values["sequence"]] = kept
        elif entry.kind == "forget":
            self.sequences.pop(values["sequence"], None)
        elif entry.kind == "model":
            self.models[values["model"]] = KeptModel(kept)
        elif entry.kind == "end":
            return self._end(values["session"])
        elif entry.kind in ("unload", "request", "answer", "save"):
            return self._of_model(kept)
        else:
            raise CheckpointError(f"the journal has an entry of kind {entry.kind!r}, which this version does not know")
        return []

    def _of_model(self, kept: Kept) -> list[str]:
        values = kept.entry.values
        model = self.models.get(values["model"])
        if model is None:  # it is gone, and what still came of it with it
            return [values["directory"]] if kept.entry.kind == "save" else []
        if kept.entry.kind == "request":
            model.requests[values["name"]] = kept
        elif kept.entry.kind == "answer":
            model.answers[values["name"]] = kept
        elif kept.entry.kind == "unload":
            del self.models[values["model"]]
            return [model.directory] if model.directory is not None else []
        else:
            following = values["following"]
            model.requests = {n: each for n, each in model.requests.items() if each.entry.values["number"] >= following}
            model.answers = {name: each for name, each in model.answers.items() if name in model.requests}
            gone, model.save = model.directory, kept
            return [gone] if gone is not None else []
        return []

    def _end(self, session: str) -> list[str]:
        self.sessions.pop(session, None)
        for mine in (self.samplers, self.sequences):
            for name in [name for name, kept in mine.items() if kept.entry.values["session"] == session]:
                del mine[name]
        own = [name for name, model in self.models.items() if model.made.entry.values["session"] == session]
        gone = [self.models.pop(name).directory for name in own]
        return [directory for directory in gone if directory is not None]

    def live(self) -> Iterator[Kept]:
        """The entries that count, in an order that adds up to the same."""
        yield from self.sessions.values()
        yield from self.samplers.values()
        yield from self.sequences.values()
        for model in self.models.values():
            yield model.made
            if model.save is not None:
                yield model.save
            yield from model.requests.values()
            yield from model.answers.values()

    def copy(self) -> Ledger:
        """The same entries, for somebody who does not see those that are added later."""
        return Ledger(dict(self.sessions), dict(self.samplers), dict(self.sequences), dict(self.models))

    @property
    def bytes(self) -> int:
        """Of the entries that count."""
        return sum(kept.place.size for kept in self.live())

    @property
    def directories(self) -> set[str]:
        """Of the saves that are needed."""
        return {model.directory for model in self.models.values() if model.directory is not None}

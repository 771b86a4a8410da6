"""The mcore-bridge side: its plain decoder."""

from mcore_bridge.model.register import ModelMeta, register_model

register_model(ModelMeta("heron", ["heron"]))

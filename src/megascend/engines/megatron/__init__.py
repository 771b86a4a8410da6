"""Building, loading and exporting models through mcore-bridge. Importing it needs a bootstrapped process."""

from megascend.runtime.bootstrap import current_runtime

current_runtime("megascend.engines.megatron").load_megatron()

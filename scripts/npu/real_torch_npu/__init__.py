"""Comparison of simnpu with torch_npu's own library, loaded on a CPU over a CANN whose kernels do nothing."""

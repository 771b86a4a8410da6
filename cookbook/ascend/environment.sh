# Sourced by the recipes beside it: what a run on Ascend cards needs from its shell. A variable that is set stays as it is.
#
# Not here, because it is yours to do:
#   source /usr/local/Ascend/ascend-toolkit/set_env.sh   puts CANN on the paths; without it the bootstrap stops and says so
#   ASCEND_RT_VISIBLE_DEVICES=0,1,2,3                    which cards a job sees, if it shall not have all of them
#   HCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME               which network interface several hosts meet on; not needed on one
#
# Not here, because there is nothing to set:
#   HCCL_IF_BASE_PORT    HCCL's first port on the host. By default every job takes the same ones, from 60000 on, and a
#                        second job on the host fails; megascend derives one from the job's rendezvous instead.
#   TASK_QUEUE_ENABLE    torch_npu prepares operators in a second thread; level 1 is its default. Level 2 moves more of
#                        the work there and takes more memory at the peak: try 2 if the cards wait for the host.
#   ASCEND_LAUNCH_BLOCKING=1   every operator waits for its result: slow, but an error then shows the line it came from.

# Seconds in which the ranks of a group must open their connections, at its first collective. CANN's 120 are few when ranks
# read a large checkpoint from a shared disk at different speeds. 600 is also the timeout_s of MegatronBackend.
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-600}

# Segments of the memory pool may grow, so that micro batches of ever different lengths do not leave it in pieces. Off by
# default; needs Ascend HDK 23.0 or later. Must be off with max_split_size_mb or garbage_collection_threshold.
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}

# Means nothing to an NPU. But Megatron-Core reads it with TP, and warns on every rank if it is not 1.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # deprecations inside the stack's packages, once a process

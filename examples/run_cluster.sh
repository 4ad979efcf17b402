#!/bin/bash
# Join this host to a Ray cluster of containers. On the first host, then on each of the others:
#
#   bash run_cluster.sh IMAGE ADDRESS_OF_THE_FIRST_HOST --head   /path/to/huggingface/home [arguments of docker run]
#   bash run_cluster.sh IMAGE ADDRESS_OF_THE_FIRST_HOST --worker /path/to/huggingface/home [arguments of docker run]
#
# The container runs until this script ends. In any of them: docker exec -it node /bin/bash, then `ray status` and
# `vllm serve ... --tensor-parallel-size GPUS_PER_HOST --pipeline-parallel-size HOSTS`. The image needs vllm[ray].
# Further arguments reach `docker run`, for example -e VLLM_HOST_IP=10.0.0.7 (this host's own address, where it has
# several), -e NCCL_SOCKET_IFNAME=eth0, or --privileged -e NCCL_IB_HCA=mlx5 for InfiniBand.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: $0 IMAGE ADDRESS_OF_THE_FIRST_HOST --head|--worker HUGGINGFACE_HOME [arguments of docker run ...]" >&2
    exit 1
fi
image=$1 head_address=$2 role=$3 huggingface_home=$4
shift 4

case $role in
    --head) start="ray start --block --head --port=6379" ;;
    --worker) start="ray start --block --address=$head_address:6379" ;;
    *)
        echo "The third argument must be --head or --worker, got $role." >&2
        exit 1
        ;;
esac

trap 'docker stop node >/dev/null 2>&1 || true; docker rm node >/dev/null 2>&1 || true' EXIT

# Shared memory is for the collectives of GPUs of one host.
docker run \
    --entrypoint /bin/bash \
    --network host \
    --name node \
    --shm-size 10.24g \
    --gpus all \
    -v "$huggingface_home:/root/.cache/huggingface" \
    "$@" \
    "$image" -c "$start"

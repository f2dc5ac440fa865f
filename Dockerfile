# Megatron-DCPO on CUDA 13.0's development image, which has no cuDNN: Transformer Engine takes a system's cuDNN before the one
# beside torch, and two releases of it in one process do not work together. So not on an NVIDIA PyTorch image either.
# torch and vLLM are their projects' own builds: a vLLM wheel is compiled against one release of torch and demands it exactly
# (0.32.0: torch 2.13.0, CUDA 13.0). vLLM 0.32.0 is what megatron_dcpo/rollout/vllm*.py is written for and tested with
# (requirements-engine.txt: its CPU build); other releases move what these modules import.
# Build:  docker build -t megatron-dcpo .     Its pip lines alone, in an empty environment:  tools/check_image.sh
# Run on a driver for CUDA 13.0 (580 or newer).
# The other target keeps an NVIDIA image's own torch, Megatron-core, Transformer Engine and Apex (tools/install_beside.sh):
#   docker build --target beside --build-arg BASE=nvcr.io/nvidia/pytorch:25.11-py3 -t megatron-dcpo:beside .
# Without vLLM, which no such torch has a wheel for: its rollouts are the transformers engine's, or those of rollout.engine=server.
ARG CUDA_BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE} AS beside
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends bubblewrap numactl && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-dcpo
COPY . .
RUN tools/install_beside.sh && dcpo --version
ENV CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false
CMD ["dcpo", "doctor"]

FROM ${CUDA_BASE} AS cuda

# Compilers and Python's headers for the extensions, bubblewrap for programs that models write, numactl for ranks beside their
# GPUs (dcpo launch), InfiniBand for NCCL
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-dev python3-venv g++ git curl bubblewrap numactl libibverbs1 ibverbs-providers librdmacm1 && \
    rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv CUDA_HOME=/usr/local/cuda
ENV SITE_PACKAGES=${VIRTUAL_ENV}/lib/python3.12/site-packages PATH=${VIRTUAL_ENV}/bin:${PATH}
RUN python3 -m venv "${VIRTUAL_ENV}"

WORKDIR /opt/megatron-dcpo
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0 vllm==0.32.0 megatron-core==0.16.1
# Transformer Engine looks in CUDNN_HOME first
ENV CUDNN_HOME=${SITE_PACKAGES}/nvidia/cudnn CUDNN_PATH=${SITE_PACKAGES}/nvidia/cudnn
# Compiled here against that torch, with the headers of the wheels; Megatron-core 0.16 is made for Transformer Engine 2.9 to
# 2.11. On A100 that takes flash-attn up to 2.8.3 for packed attention (--build-arg FLASH_ATTN=1, long to compile: MAX_JOBS);
# from Hopper on it prefers cuDNN's where both could run (get_attention_backend in dot_product_attention/utils.py).
ARG MAX_JOBS=8
ENV CPATH=${SITE_PACKAGES}/nvidia/cu13/include:${SITE_PACKAGES}/nvidia/cudnn/include:${SITE_PACKAGES}/nvidia/nccl/include
RUN pip install --no-cache-dir setuptools wheel pybind11 ninja psutil packaging
RUN NVTE_FRAMEWORK=pytorch pip install --no-cache-dir --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.11.0"
ARG FLASH_ATTN=
RUN test -z "${FLASH_ATTN:-}" || FLASH_ATTN_CUDA_ARCHS="80" pip install --no-cache-dir --no-build-isolation --no-deps flash-attn==2.8.3
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[train,hub]" pytest pytest-timeout pytest-xdist
# torch's own pin, 9.20.0.48, lacks libcudnn_engines_tensor_ir. Last: whatever needs torch would put the pin back
RUN pip install --no-cache-dir --no-deps nvidia-cudnn-cu13==9.21.1.3 && dcpo --version

ENV CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false
ENTRYPOINT []
CMD ["dcpo", "doctor"]

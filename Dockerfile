# Megatron-DCPO on NVIDIA's PyTorch container, for its CUDA 13.0 toolkit, cuDNN, and libraries of InfiniBand and other networks.
# torch and vLLM are their projects' own builds, in an environment beside the image's. A vLLM wheel is compiled against one
# release of torch and demands it exactly (0.32.0: torch 2.13.0, CUDA 13.0), which the image's torch "2.x.0a0" never is.
# vLLM 0.32.0 is what megatron_dcpo/rollout/vllm*.py is written for and tested with (requirements-engine.txt: its CPU build);
# other releases move what these modules import.
# Build:  docker build -t megatron-dcpo .            Other base:  --build-arg BASE=nvcr.io/nvidia/pytorch:YY.MM-py3 (CUDA 13)
ARG BASE=nvcr.io/nvidia/pytorch:25.10-py3
FROM ${BASE}

# The image constrains pip to its own torch and lets the loader find that one's libraries first.
ENV PIP_CONSTRAINT= \
    LD_LIBRARY_PATH=/usr/local/cuda/compat/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:${PATH}
RUN python3 -m venv "${VIRTUAL_ENV}"

WORKDIR /opt/megatron-dcpo
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0 vllm==0.32.0 megatron-core==0.16.1
# compiled here against that torch; Megatron-core 0.16 is made for 2.9 to 2.11
RUN pip install --no-cache-dir setuptools wheel pybind11 && \
    pip install --no-cache-dir --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.11.0"
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt . && dcpo --version

ENV CUDA_DEVICE_MAX_CONNECTIONS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
ENTRYPOINT []
CMD ["dcpo", "doctor"]

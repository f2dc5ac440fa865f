# Megatron-DCPO on NVIDIA's PyTorch container: torch, Transformer Engine and Apex come from the image and stay as they are.
# Build:  docker build -t megatron-dcpo .            Other base:  --build-arg BASE=nvcr.io/nvidia/pytorch:YY.MM-py3
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3
FROM ${BASE}

WORKDIR /opt/megatron-dcpo
COPY setup.py pyproject.toml README.md ./
COPY megatron_dcpo/__init__.py megatron_dcpo/__init__.py

# The image pins its own builds of torch and friends in /etc/pip/constraint.txt; pip must not replace them.
ARG VLLM=vllm
RUN pip install --no-cache-dir --constraint /etc/pip/constraint.txt "megatron-core>=0.16,<0.17" "${VLLM}" || \
    (echo "vLLM does not fit this image's torch: build with --build-arg VLLM='vllm==VERSION' or another BASE" && exit 1)
COPY . .
RUN pip install --no-cache-dir --constraint /etc/pip/constraint.txt ".[gpu]" && dcpo --version

ENV CUDA_DEVICE_MAX_CONNECTIONS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
ENTRYPOINT []
CMD ["dcpo", "doctor"]

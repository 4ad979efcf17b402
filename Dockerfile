# A server for NVIDIA GPUs, under a name of your registry that the manifests in examples/ have too:
#     docker build . --target vllm-openai --tag registry.example.com/vllm-server
# With Ray, for several hosts: --build-arg EXTRAS=[ray]
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY csrc ./csrc
COPY tools ./tools
COPY vllm ./vllm
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS vllm-openai
# Triton compiles a small C file at its first start.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev curl && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN python -m pip install --no-cache-dir --index-url ${TORCH_INDEX} "torch>=2.9"
ARG EXTRAS=
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(echo /wheels/vllm-*.whl)${EXTRAS}" && rm -r /wheels
ENV HF_HOME=/root/.cache/huggingface
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s CMD ["curl", "--fail", "--silent", "http://localhost:8000/health"]
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]

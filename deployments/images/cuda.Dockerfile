# Assay with vLLM on NVIDIA GPUs. From the root of the checkout:
#   docker build -f deployments/images/cuda.Dockerfile -t assay-cuda --build-arg COMMIT=$(git rev-parse HEAD) .
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG UV_NO_CACHE=1
ARG UV_COMPILE_BYTECODE=1
ARG VIRTUAL_ENV=/opt/assay
ARG ASSAY_CACHE_DIR=/opt/assay
ARG UV_PYTHON_INSTALL_DIR=/opt/assay/python
ENV PATH=/opt/assay/bin:$PATH
WORKDIR /opt/build
# g++ compiles kernels of engines as they run. Versions are those of the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --home-dir /scratch --create-home assay

COPY resources/environments/requirements/orchestrator.txt requirements/
RUN python3 -m venv /opt/assay \
    && pip install --no-cache-dir --constraint requirements/orchestrator.txt uv \
    && uv pip install --requirements requirements/orchestrator.txt \
    && uv python install 3.12

# What is built seldom comes before what changes daily: the environments, then Assay.
COPY resources/__init__.py resources/errors.py resources/settings.py resources/
COPY resources/storage/__init__.py resources/storage/files.py resources/storage/regular_files.py resources/storage/
COPY resources/environments/__init__.py resources/environments/environments.py resources/environments/
COPY deployments/images/build.py ./

COPY resources/environments/requirements/vllm-cuda.txt resources/environments/requirements/
RUN python build.py resources.environments.environments ENVIRONMENTS vllm-cuda

COPY tasks/evaluators/environments.py tasks/evaluators/
COPY tasks/evaluators/lm_eval/requirements/lm-eval.txt tasks/evaluators/lm_eval/requirements/
RUN python build.py tasks.evaluators.environments LM_EVAL

COPY tasks/evaluators/helm/requirements/helm.txt tasks/evaluators/helm/requirements/helm-overrides.in tasks/evaluators/helm/requirements/
RUN python build.py tasks.evaluators.environments HELM

COPY tasks/evaluators/alpaca_eval/requirements/alpaca-eval.txt tasks/evaluators/alpaca_eval/requirements/
RUN python build.py tasks.evaluators.environments ALPACA_EVAL

COPY tasks/evaluators/inspect_ai/requirements/inspect-ai.txt tasks/evaluators/inspect_ai/requirements/
RUN python build.py tasks.evaluators.environments INSPECT_AI

COPY tasks/evaluators/levanter/requirements/levanter-cuda.txt tasks/evaluators/levanter/requirements/
RUN python build.py tasks.evaluators.environments LEVANTER gpu

# What `.dockerignore` lets in. Builders that do not compare arguments of labels compare those of a RUN.
ARG VERSION
ARG COMMIT
COPY . source/
RUN uv pip install --no-deps ./source
LABEL org.opencontainers.image.title="Assay: vLLM on NVIDIA GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}"
ENV HOME=/scratch \
    ASSAY_BUILT_ENVIRONMENTS=/opt/assay/environments \
    ASSAY_COMMIT=${COMMIT}
USER 1000:1000
WORKDIR /scratch
ENTRYPOINT ["tini", "--", "assay"]
CMD ["doctor"]

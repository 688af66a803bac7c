# Stencil on CPUs. docs/observability.md says how to build it and run it.

ARG PYTHON_VERSION=3.11
FROM python:${PYTHON_VERSION}-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# The project's requirements as two lists. Later layers depend on what the lists say, not on pyproject.toml: only another
# version of PyTorch in constraints.txt installs it again.
FROM base AS requirements
WORKDIR /requirements
COPY pyproject.toml constraints.txt ./
# EXTRAS: of the package that are installed too, such as "ray".
ARG EXTRAS=
RUN python -c "import sys, tomllib; read = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*read['dependencies'], *(each for extra in sys.argv[1].split() for each in read['optional-dependencies'][extra]), sep='\n')" "${EXTRAS}" > all.txt \
    && grep '^torch==' constraints.txt > torch.txt \
    && grep -v '^torch[<>=]' all.txt > other.txt

FROM base AS packages
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY engine engine
COPY entrypoints entrypoints
COPY model_executor model_executor
RUN pip install --no-deps --target /packages .

FROM base
# The server compiles its kernels for the CPU that it runs on. The base image decides which compiler there is.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --create-home stencil \
    && install --directory --owner stencil --group stencil /home/stencil/.cache \
    && python -m venv /opt/stencil
ENV PATH=/opt/stencil/bin:$PATH \
    PYTHONPATH=/opt/stencil/packages \
    PYTHONUNBUFFERED=1 \
    HOME=/home/stencil

# From PyTorch's own index: the wheels of pypi.org bring CUDA along, some gigabytes of it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements /requirements/torch.txt /opt/stencil/requirements/
RUN pip install --index-url "${TORCH_INDEX}" --requirement /opt/stencil/requirements/torch.txt
COPY --from=requirements /requirements/other.txt /requirements/constraints.txt /opt/stencil/requirements/
RUN pip install --requirement /opt/stencil/requirements/other.txt --constraint /opt/stencil/requirements/constraints.txt
COPY --from=packages /packages /opt/stencil/packages

USER 10001:10001
WORKDIR /home/stencil
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The exec form: SIGTERM reaches the server itself, which drains.
ENTRYPOINT ["python", "-m", "entrypoints.serve", "--host", "0.0.0.0"]

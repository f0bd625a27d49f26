# Serves a bundle on the CPU: the runtime and the server, no torch, no compiler. See docker/README.md.
# The base has the Python version that the tests run with; another one is given with --build-arg BASE_IMAGE=…
ARG BASE_IMAGE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY specexport specexport
COPY runtime runtime
COPY docker/pins docker/pins
# Packages of known hashes only: what compiles our operators stays in this stage, and so does pip.
RUN python -m venv --without-pip /opt/specexport \
    && python -m pip install --no-cache-dir --require-hashes --only-binary :all: -r docker/pins/build.txt \
    && python -m pip wheel --no-cache-dir --no-build-isolation --require-hashes --wheel-dir /wheels -r docker/pins/cpu.txt \
    && python -m pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels . \
    && python -m pip --python /opt/specexport/bin/python install --no-index --no-deps /wheels/*.whl

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="specexport" \
      org.opencontainers.image.description="Serves a specexport bundle over HTTP, on the CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
# A number, so that Kubernetes can tell that it is not root. No home folder, no shell.
RUN groupadd --gid 10001 specexport \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin specexport \
    && install --directory --owner 10001 --group 10001 --mode 0700 /cache
COPY --from=build /opt/specexport /opt/specexport
ENV PATH=/opt/specexport/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    SPECEXPORT_CACHE_DIR=/cache
USER 10001:10001
WORKDIR /cache
VOLUME ["/cache"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# http.client and not urllib: a proxy named in the environment must not be asked. /health needs no key.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", \
    "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
# All other addresses than loopback need a key: SPECEXPORT_API_KEY. More options go after the image's name.
ENTRYPOINT ["specexport", "serve", "/bundle", "--host", "0.0.0.0", "--port", "8000"]

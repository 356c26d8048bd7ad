# m2lgdg on CPUs: the linear methods. With networks: docker build --build-arg EXTRAS=networks,serve -t m2lgdg .
# A build that can be repeated names the digest of its base: --build-arg PYTHON=python:3.12-slim@sha256:...
ARG PYTHON=python:3.12-slim
FROM ${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON}
ARG EXTRAS="serve"
# PyTorch without CUDA, which is much smaller; used if EXTRAS has networks.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A read-only image (Apptainer) and a user without a home folder can write to /tmp only.
ENV PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib
RUN install -d -o 1000 -g 1000 /work
COPY constraints.txt /opt/constraints.txt
COPY --from=build /wheels /opt/wheels
RUN wheel=$(ls /opt/wheels/*.whl) && \
    python -m pip install --no-cache-dir --no-compile --extra-index-url "$TORCH_INDEX" \
        -c /opt/constraints.txt "$wheel${EXTRAS:+[$EXTRAS]}" && \
    rm -r /opt/wheels && m2lgdg doctor
WORKDIR /work
USER 1000:1000
# The server is asked; a container that runs another command is healthy.
HEALTHCHECK --interval=1m --timeout=10s --start-period=30s CMD grep -qz '^serve$' /proc/1/cmdline || exit 0; python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8765/health', timeout=5)"
ENTRYPOINT ["m2lgdg"]
# Publishes the model of the package: docker run -p 8765:8765 -e M2LGDG_TOKEN m2lgdg; without the token it refuses.
CMD ["serve", "--host", "0.0.0.0"]

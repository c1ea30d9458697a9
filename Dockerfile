# The study in one image: docs/container.md. `make image` builds it, `make image-test` tries it.
# No heredoc, no `COPY --link` and no `# syntax` line: buildah and older Dockers refuse them.
# Both bases are named by digest, so that a tag that moves changes nothing.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6
ARG RUNTIME_IMAGE=ubuntu:24.04@sha256:4fbb8e6a8395de5a7550b33509421a2bafbc0aab6c06ba2cef9ebffbc7092d90

# flash-attn 2 comes as source: the only part that needs nvcc. FLASH_ATTN=no leaves it out.
FROM ${BASE_IMAGE} AS flash-attn
ARG DEBIAN_FRONTEND=noninteractive
ARG FLASH_ATTN=yes
WORKDIR /build
COPY requirements/cuda.txt requirements/flash-attn.txt requirements/flash-attn.sh requirements/
# The base decides the versions, and may be any Debian or Ubuntu: none is pinned.
# hadolint ignore=DL3008
RUN mkdir wheels \
 && if [ "${FLASH_ATTN}" != no ]; then \
        apt-get update \
     && apt-get install -y --no-install-recommends g++ gcc python3 python3-dev python3-venv \
     && rm -rf /var/lib/apt/lists/* \
     && python3 -m venv venv \
     && venv/bin/python -m pip install --no-cache-dir --require-hashes --no-deps \
            -r requirements/cuda.txt; \
    fi
# A job of the compiler takes up to 8 GB of memory.
ARG FLASH_ATTN_CUDA_ARCHS="80;90;100;120"
ARG MAX_JOBS=4
RUN if [ "${FLASH_ATTN}" != no ]; then \
        FLASH_ATTN_CUDA_ARCHS="${FLASH_ATTN_CUDA_ARCHS}" MAX_JOBS="${MAX_JOBS}" \
        requirements/flash-attn.sh venv/bin/python wheels; \
    fi
RUN find wheels -name '*.whl' -exec sha256sum {} + > wheels.txt \
 && sed -i -E 's|(\S+) +(\S+)|/\2 --hash=sha256:\1|' wheels.txt

# The wheels bring CUDA along, so a plain base is enough. gcc compiles the launchers of Triton, g++
# the code of torch.compile for the processor; both run at each study.
FROM ${RUNTIME_IMAGE} AS runtime
ARG DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
        ca-certificates g++ gcc make python3 python3-dev python3-venv \
        texlive-latex-recommended texlive-pictures texlive-latex-extra texlive-science latexmk \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /study
# The environment before the code: an edit of a kernel does not install torch again. Without the
# tests of large libraries and without static libraries it is 0.2 GB smaller, and 0.2 GB without two
# libraries of NVIDIA that no other file names.
COPY requirements/cuda.txt requirements/
RUN python3 -m venv .venv \
 && .venv/bin/python -m pip install --no-cache-dir --require-hashes --no-deps \
        -r requirements/cuda.txt \
 && for name in matplotlib networkx numpy pandas scipy sympy; do \
        find .venv/lib/python3*/site-packages/"${name}" -type d -name tests -prune \
            -exec rm -r {} +; \
    done \
 && find .venv \( -name '*.a' -o -name 'libcusolverMg.so*' -o -name 'libnvrtc*.alt.so*' \) -delete
# The rivals; flash-attn 2 before the others, since flash-attn-4 replaces a part of it. buildah does
# not look for changes of what is mounted, so a list of it is copied.
COPY requirements/peers.txt requirements/
COPY --from=flash-attn /build/wheels.txt requirements/
RUN --mount=type=bind,from=flash-attn,source=/build/wheels,target=/wheels \
    .venv/bin/python -m pip install --no-cache-dir --require-hashes --no-index --no-deps \
        -r requirements/wheels.txt \
 && .venv/bin/python -m pip install --no-cache-dir --require-hashes --no-deps \
        -r requirements/peers.txt \
 && ln -s /study/.venv/lib/python3*/site-packages/nvidia/cuda_runtime/lib .venv/cuda12

# What is in the image: a bill of materials (CycloneDX) and the licences of the Python packages.
FROM runtime AS sbom
WORKDIR /sbom
COPY requirements/supply.txt image/sbom.py ./
RUN python3 -m venv venv \
 && venv/bin/python -m pip install --no-cache-dir --require-hashes --no-deps -r supply.txt \
 && mkdir out \
 && venv/bin/python sbom.py --environment /study/.venv --out out

FROM runtime
RUN useradd --create-home --uid 1001 tilewright
COPY . .
COPY --from=sbom /sbom/out sbom
# The code belongs to root and stays as it is. A mount on results/ would hide the recorded run, so
# that lies beside it; image/start.sh links it in. Snakemake keeps its memory with the results.
RUN mv results/recorded recorded \
 && install -d -m 1777 results \
 && ln -s ../recorded results/recorded \
 && ln -s results/.snakemake .snakemake \
 && .venv/bin/python -m compileall -q -x '/\.venv/' .
USER 1001

# The image holds no history: its commit is stated, with "-dirty" behind it if files differed. It
# cannot hold its own digest: TILEWRIGHT_IMAGE may state that at the start.
ARG TILEWRIGHT_VERSION=""
ARG TILEWRIGHT_COMMIT=""
ARG TILEWRIGHT_SOURCE=""
ARG RUNTIME_IMAGE
LABEL org.opencontainers.image.title="Tilewright" \
      org.opencontainers.image.description="Triton kernels, proved, timed and reported" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${TILEWRIGHT_VERSION}" \
      org.opencontainers.image.revision="${TILEWRIGHT_COMMIT}" \
      org.opencontainers.image.source="${TILEWRIGHT_SOURCE}" \
      org.opencontainers.image.base.name="${RUNTIME_IMAGE}"
# An empty entry of LD_LIBRARY_PATH would be the current folder. The NVIDIA variables are those
# that the container toolkit reads; a plain base does not set them.
ENV TILEWRIGHT_COMMIT=${TILEWRIGHT_COMMIT} TILEWRIGHT_IMAGE="built on ${RUNTIME_IMAGE}" \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/study/.venv/bin:${PATH} \
    LD_LIBRARY_PATH=/study/.venv/cuda12${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}

ENTRYPOINT ["/study/image/start.sh"]
CMD ["study"]

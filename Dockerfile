# The study in one image: `make image`, then
# docker run --gpus all --name study \
#     --env TILEWRIGHT_IMAGE=$(docker image inspect --format '{{.Id}}' tilewright) tilewright
# docker cp study:/tilewright/results/study results/image
# Without --gpus it replays the recorded run. No step needs the network once the image is built.
# The base is named by its tag, which its owner may move: who must have the same bytes names a digest
# (--build-arg BASE_IMAGE=nvidia/cuda@sha256:...). Only flash-attn 2 needs the compiler of a devel base.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE_IMAGE}

ARG DEBIAN_FRONTEND=noninteractive
# The base decides the versions, and may be any Debian or Ubuntu: none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
        ca-certificates g++ gcc make python3 python3-dev python3-venv \
        texlive-latex-recommended texlive-pictures texlive-latex-extra texlive-science latexmk \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1001 tilewright && install -d -o tilewright /tilewright
USER 1001
WORKDIR /tilewright

# The environment before the code: an edit of a kernel does not install torch again.
COPY --chown=tilewright requirements/cuda.txt requirements/flash-attn.txt requirements/peers.txt \
     requirements/
RUN python3 -m venv .venv \
 && .venv/bin/python -m pip install --no-cache-dir --require-hashes --no-deps \
        -r requirements/cuda.txt

# The rivals. flash-attn 2 is compiled, for hours, where this names GPUs, such as "90;100"; before
# the others, since flash-attn-4 replaces a part of it.
ARG FLASH_ATTN_CUDA_ARCHS=""
RUN test -z "${FLASH_ATTN_CUDA_ARCHS}" \
 || .venv/bin/python -m pip install --no-cache-dir --require-hashes --no-deps \
        --no-build-isolation -r requirements/flash-attn.txt
RUN .venv/bin/python -m pip install --no-cache-dir --require-hashes --no-deps \
        -r requirements/peers.txt \
 && ln -s /tilewright/.venv/lib/python3*/site-packages/nvidia/cuda_runtime/lib .venv/cuda12

COPY --chown=tilewright . .
# Whoever runs it (--user) may write what a study writes; the code stays as it is.
RUN install -d -m 1777 .snakemake results/study && chmod 1777 . results

# The image holds no history; this is its commit, with "-dirty" behind it where files differed, and
# the address of its source where whoever builds it states one. Its own digest it cannot hold: whoever
# runs it may state it, else the record says what it is built on.
ARG TILEWRIGHT_COMMIT=""
ARG TILEWRIGHT_SOURCE=""
ARG BASE_IMAGE
LABEL org.opencontainers.image.title="Tilewright" \
      org.opencontainers.image.description="Triton kernels, proved, timed and reported" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.revision="${TILEWRIGHT_COMMIT}" \
      org.opencontainers.image.source="${TILEWRIGHT_SOURCE}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
# An empty entry of LD_LIBRARY_PATH would be the current folder.
ENV TILEWRIGHT_COMMIT=${TILEWRIGHT_COMMIT} TILEWRIGHT_IMAGE="built on ${BASE_IMAGE}" \
    PATH=/tilewright/.venv/bin:${PATH} \
    LD_LIBRARY_PATH=/tilewright/.venv/cuda12${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}

ENTRYPOINT ["requirements/start.sh"]
CMD ["--cores", "all"]

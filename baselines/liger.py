"""Liger-Kernel (Hsu et al., 2024): its functional interface."""

from liger_kernel.transformers.functional import liger_layer_norm, liger_softmax

LIBRARY = "liger-kernel"


def softmax(x):
    return liger_softmax(x)


def layer_norm(x, weight, bias, eps):
    return liger_layer_norm(x, weight, bias, eps)

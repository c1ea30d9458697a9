"""Boundaries of packed sequences, as the harness hands them to an implementation."""

import torch

from ops import attention_varlen
from ops.attention_varlen import ATTENTION_VARLEN


def test_packed_cases_with_as_many_keys_as_rows_have_one_tensor_of_boundaries():
    handed = ATTENTION_VARLEN.adapted(lambda **given: given)
    for case in (*ATTENTION_VARLEN.edge, *ATTENTION_VARLEN.sweep):
        sizes = attention_varlen.lengths_of_rows(case), attention_varlen.lengths_of_keys(case)
        cu_q, cu_k = torch.empty(0), torch.empty(0)
        q, k = (torch.empty(n, 0) for n in (case["T"], case.sizes.get("U", case["T"])))
        given = handed(q=q, k=k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        assert given["cu_seqlens_q"] is cu_q and given["q"] is q and given["k"] is k
        assert given["cu_seqlens_k"] is (cu_q if sizes[0] == sizes[1] else cu_k)

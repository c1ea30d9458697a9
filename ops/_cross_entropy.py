"""The loss that cross entropy and linear cross entropy share.

The loss of a row x with target t, smoothing e and z-loss coefficient z is
    lse - (1 - e) x[t] - e mean x + z lse^2,  lse = log sum exp x.
A row whose target is the ignored index has none, and does not count. With a softcap c the logits y
become x = c tanh(y / c) first.
"""

import torch


def reference(
    logits, targets, ignore_index, label_smoothing, z_loss, reduction, softcap=None, loss_dtype=None
):
    """Return the loss; loss_dtype: a dtype to which it is widened, if it is a wider one."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    top = logits.detach().amax(dim=-1, keepdim=True)
    lse = top[:, 0] + torch.log(torch.exp(logits - top).sum(dim=-1))
    kept = targets != ignore_index
    own = logits.gather(-1, torch.where(kept, targets, 0).long()[:, None])[:, 0]
    loss = lse - (1 - label_smoothing) * own
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(dim=-1)
    if z_loss:
        loss = loss + z_loss * lse * lse
    loss = torch.where(kept, loss, 0.0)
    if loss_dtype is not None:
        loss = loss.to(torch.promote_types(loss.dtype, loss_dtype))
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()

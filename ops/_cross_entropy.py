"""The loss that cross entropy and linear cross entropy share.

The loss of a row x with target t, smoothing e and z-loss coefficient z is
    lse - (1 - e) x[t] - e mean x + z lse^2,  lse = log sum exp x.
A row whose target is the ignored index has none, and does not count.
"""

import torch


def reference(logits, targets, ignore_index, label_smoothing, z_loss, reduction):
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
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()

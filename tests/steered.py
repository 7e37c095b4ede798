"""Drafters that are sense or nonsense on purpose; their contexts are kept as always."""

import torch


class Steered:
    """A drafter whose logits are replaced by what `steer(logits, request)` makes of them."""

    def __init__(self, drafter, steer):
        self.drafter, self.config, self.steer = drafter, drafter.config, steer
        self.new_context = drafter.new_context
        self.extend, self.extend_features = drafter.extend, drafter.extend_features

    def draft(self, context, request):
        return self.steer(self.drafter.draft(context, request), request)


def random_logits(logits, request):
    generator = torch.Generator().manual_seed(sum(request.root_tokens) + sum(request.num_generated))
    return torch.randn(logits.shape, generator=generator)


def tied_logits(logits, request):
    return torch.zeros_like(logits)  # every tree is full of ties


def one_token_only(logits, request):
    banned = torch.full_like(logits, -torch.inf)
    banned[..., request.root_tokens[0]] = 0.0  # trees smaller than the budget
    return banned


def always(logits):
    """Return the steer that answers `logits` [V] everywhere, whatever the text."""
    return lambda drafted, request: logits.to(drafted).expand_as(drafted).contiguous()

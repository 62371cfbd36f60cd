"""The element-wise optimizers of torch.optim, by their name and options, in each of their forms."""

import functools

from torch import optim

CLASSES = {
    "SGD": (optim.SGD, {}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}),
    "SGD nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW": (optim.AdamW, {}),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True, "weight_decay": 0.2}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"weight_decay": 0.1}),
    "RMSprop centered": (optim.RMSprop, {"centered": True, "momentum": 0.5, "maximize": True}),
    "Adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "Adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"weight_decay": 0.1}),
    "ASGD": (optim.ASGD, {"weight_decay": 0.1, "t0": 2}),
    "Rprop": (optim.Rprop, {}),
}
ARGUMENTS = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}
FUSED = [name for name in CLASSES if name.split()[0] in ("SGD", "Adam", "AdamW", "Adagrad")]
FORMS = {"foreach": list(CLASSES), "for-loop": list(CLASSES), "fused": FUSED}
"""By form, the names of those that have it."""


def maker(name, form):
    """What makes the optimizer of parameters."""
    make, options = CLASSES[name]
    return functools.partial(make, lr=0.1, **options, **ARGUMENTS[form])

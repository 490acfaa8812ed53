"""How the book's figures look, and how large its runs are."""

import os
from typing import Literal, cast, get_args

COLORS = {
    "plain": "#6b6b6b",
    "plus": "#0072b2",
    "minus": "#d55e00",
    "control": "#009e73",
    "swindled": "#aa3377",
    "truth": "#000000",
}
"""One colour for one chain, in every figure; colour-blind safe."""


def use_style() -> None:
    """Set matplotlib up for the book: call it once, before the first figure."""
    import matplotlib.pyplot as plt
    from cycler import cycler
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    set_matplotlib_formats("svg")
    plt.rcParams.update(
        {
            "figure.figsize": (7, 4),
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "font.size": 12,
            "axes.titlesize": 12,
            "axes.labelsize": 12,
            "legend.fontsize": 11,
            "xtick.labelsize": 11,
            "ytick.labelsize": 11,
            "legend.frameon": False,
            "axes.prop_cycle": cycler(color=list(COLORS.values())),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "lines.linewidth": 1.8,
            "savefig.transparent": False,
            "svg.fonttype": "path",
            "svg.hashsalt": "swindles",
        }
    )


Scale = Literal["smoke", "laptop", "paper"]


def scale() -> Scale:
    """How large the book's runs are: the environment's ``SWINDLES_SCALE``.

    ``laptop`` (the default) takes about a minute a chapter on two cores; ``paper``
    has the paper's sizes and wants a GPU; ``smoke`` only shows that everything runs.
    """
    value = os.environ.get("SWINDLES_SCALE", "laptop")
    if value not in get_args(Scale):
        raise ValueError(f"SWINDLES_SCALE is {value!r}: say one of {get_args(Scale)}")
    return cast(Scale, value)

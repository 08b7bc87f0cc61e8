"""The end of a run: the comparison with the byte statistics, the picture, the sample of text."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # Draws into files; must come before pyplot, which may look for a screen.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from .options import UserError
from .training import History

MODEL = "MoE model"

SMOOTHING_SHARE = 0.02
"""The dark training curve is a running mean over this share of the steps."""

HEAT_MAPS_PER_ROW = 4

TRAIN_COLOR, VALIDATION_COLOR, REFERENCE_COLOR = "#1f6fb4", "#d9480f", "#555555"


def comparison(bits: dict[str, float], scored: int) -> str:
    """Says in words which model predicts the validation text best.

    Args:
        bits: bits per byte by name of the model; one name is MODEL.
        scored: number of bytes that were predicted.
    """
    lines = [f"Validation bits per byte ({scored:,} bytes that no model was fitted to):"]
    lines += [f"  {name:<14} {value:.3f}" for name, value in bits.items()]
    best, second = sorted(bits, key=bits.__getitem__)[:2]
    lines.append(f"Best: {best}, {bits[second] - bits[best]:.3f} bits per byte below the {second}.")
    if best != MODEL:
        lines.append(f"The {MODEL} has not beaten it yet; try more --steps.")
    return "\n".join(lines)


def draw(path: Path, history: History, step: int, references: dict[str, float], title: str) -> None:
    """Writes a PNG: curves of bits per byte above, expert load over time of each layer below.

    Args:
        path: file to write.
        history: measurements of at least `step` steps.
        step: steps done, at least 1.
        references: bits per byte of what the model is compared with, by name.
        title: one line above the picture.
    """
    load = history.load_until(step).double().numpy()
    relative_load = load / load.mean(axis=2, keepdims=True)
    bins, layers, experts = load.shape
    columns = min(layers, HEAT_MAPS_PER_ROW)
    rows = -(-layers // columns)
    figure = plt.figure(figsize=(11, 5.2 + 2.4 * rows), layout="constrained")
    curves_part, maps_part = figure.subfigures(
        2, 1, squeeze=False, height_ratios=[4.6, 2.4 * rows + 0.6]
    ).flatten()
    figure.suptitle(title, fontsize=12, parse_math=False)  # The title may hold a "$".
    _draw_curves(curves_part.subplots(), history, step, references)

    axes = maps_part.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    # White is an even share; red up to twice the share, more is as red as twice.
    norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=2)
    for layer, axis in enumerate(axes):
        if layer >= layers:
            axis.set_visible(False)
            continue
        image = axis.imshow(
            relative_load[:, layer].T,
            aspect="auto",
            cmap="RdBu_r",
            norm=norm,
            interpolation="nearest",
            extent=(0, bins * history.steps_per_bin, experts - 0.5, -0.5),
        )
        axis.set_title(f"layer {layer}", fontsize=10)
        axis.set_xlabel("step")
        if layer % columns == 0:
            axis.set_ylabel("expert")
            axis.yaxis.get_major_locator().set_params(integer=True)
    bar = maps_part.colorbar(image, ax=list(axes), ticks=[0, 0.5, 1, 1.5, 2], extend="max")
    bar.set_label("load / even share")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    finally:
        plt.close(figure)


def _draw_curves(axis: Axes, history: History, step: int, references: dict[str, float]) -> None:
    train = history.train_bits[:step].numpy()
    steps = np.arange(1, step + 1)
    axis.plot(steps, train, color=TRAIN_COLOR, alpha=0.25, linewidth=0.8)
    window = np.ones(1 + 2 * int(step * SMOOTHING_SHARE / 2))
    # At both ends the window hangs over: divide by the number of steps that it does see.
    smooth = np.convolve(train, window, "same") / np.convolve(np.ones(step), window, "same")
    axis.plot(steps, smooth, color=TRAIN_COLOR, linewidth=1.8, label="training")
    if history.validation:
        at, bits = zip(*history.validation, strict=True)
        axis.plot(
            at,
            bits,
            color=VALIDATION_COLOR,
            linewidth=1.8,
            marker="o",
            markersize=4,
            label=f"validation ({bits[-1]:.2f} at the end)",
        )
    for name, value in references.items():
        axis.axhline(value, color=REFERENCE_COLOR, linewidth=1.2, linestyle=(0, (5, 3)))
        axis.annotate(
            f"{name}: {value:.2f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-6, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=REFERENCE_COLOR,
            fontsize=10,
        )
    axis.set_xlim(0, step)
    axis.set_ylim(0, None)
    axis.set_xlabel("step")
    axis.set_ylabel("bits per byte")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower left", frameon=False)

"""Draws pictures/tau-by-training-tokens.svg from results/tau-by-training-tokens.json.

python docs/measure/draw_tau.py
"""

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

from draftless_commands.shared.results import save_figure  # noqa: E402

NAME = "tau-by-training-tokens"
COLOURS = {"Medusa": "#CC79A7", "Hydra": "#009E73", "EAGLE-1": "#D55E00", "EAGLE-3": "#0072B2"}  # Okabe and Ito


def main() -> None:
    with save_figure(DOCS / "pictures" / f"{NAME}.svg", 7, 5.2, 13) as figure:
        axes = figure.subplots()
        for series in json.loads((DOCS / "results" / f"{NAME}.json").read_text())["series"]:
            similar = series["measure"] == "similar"
            x, y = zip(*series["points"], strict=True)
            colour = COLOURS[series["head"].removesuffix("++")]
            face, line = (colour, "-") if similar else ("white", "--")
            axes.plot(x, y, line, color=colour, marker="o", markerfacecolor=face, linewidth=2)
            if not similar:
                axes.annotate(series["head"], (x[-1], y[-1]), (8, -4), textcoords="offset points", color=colour)
        axes.annotate("Hydra", (0.52, 1.83), (6, -14), textcoords="offset points", color=COLOURS["Hydra"])
        axes.plot([], [], "k-o", label="prompts like the training's, first pass")
        axes.plot([], [], "k--o", markerfacecolor="white", label="prompts of another kind, all passes")
        axes.legend(frameon=False, loc="upper left", fontsize=12)
        axes.set(xlabel="distinct training tokens (millions)", ylabel="tau: tokens per forward pass, 16 nodes")
        axes.set(xlim=(0, 3.7), ylim=(1.5, 2.7))
        axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()

"""Draws pictures/tau-by-training-tokens.svg from results/tau-by-training-tokens.json.

python -m docs.measure.draw_tau
"""

import json
from pathlib import Path

from draftless_commands.shared.results import COLOURS, save_figure

DOCS, NAME = Path(__file__).resolve().parents[1], "tau-by-training-tokens"
OF_HEAD = dict(zip(("EAGLE-3", "Hydra", "Medusa", "EAGLE-1"), (COLOURS[0], *COLOURS[2:5]), strict=True))


def main() -> None:
    with save_figure(DOCS / "pictures" / f"{NAME}.svg", 7, 5.2, 13) as figure:
        axes = figure.subplots()
        for series in json.loads((DOCS / "results" / f"{NAME}.json").read_text())["series"]:
            similar = series["measure"] == "similar"
            x, y = zip(*series["points"], strict=True)
            colour = OF_HEAD[series["head"].removesuffix("++")]
            face, line = (colour, "-") if similar else ("white", "--")
            axes.plot(x, y, line, color=colour, marker="o", markerfacecolor=face, linewidth=2)
            if not similar:
                axes.annotate(series["head"], (x[-1], y[-1]), (8, -4), textcoords="offset points", color=colour)
        axes.annotate("Hydra", (0.52, 1.83), (6, -14), textcoords="offset points", color=OF_HEAD["Hydra"])
        axes.plot([], [], "k-o", label="prompts like the training's, first pass")
        axes.plot([], [], "k--o", markerfacecolor="white", label="prompts of another kind, all passes")
        axes.legend(frameon=False, loc="upper left", fontsize=12)
        axes.set(xlabel="distinct training tokens (millions)", ylabel="tau: tokens per forward pass, 16 nodes")
        axes.set(xlim=(0, 3.7), ylim=(1.5, 2.7))
        axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()

"""Loss parity: the loss of each stack less that of PyTorch, in the band of PyTorch's own seeds."""

import _figure
import _network
from _data import read, run
from _parity import parity


def main(arguments):
    rows = read(arguments.run, "loss_parity")
    found = parity(rows)
    if found is None:
        _figure.nothing(arguments.out, "This run has no losses of three seeds.")
        return
    figure, (left, right) = _figure.plt.subplots(
        1, 2, figsize=(_figure.WIDTH, 2.3), width_ratios=(1, 1.6)
    )
    left.plot(found.steps, found.centre, color=_figure.DARK)
    left.set(xlabel="step", ylabel="loss of torch_eager", title=_network.about(rows))
    band = {"color": "#dddddd", "linewidth": 0, "label": "band"}
    right.fill_between(found.steps, -found.width, found.width, **band)
    styles = _figure.looks(rows["stack"])
    for stack in _network.whole(found.gaps):
        look = {key: styles[stack][key] for key in ("color", "marker")}
        gaps = found.gaps[stack]
        right.plot(found.steps, gaps, markersize=3, linewidth=0.9, label=stack, **look)
    right.set(xlabel="step", ylabel="gap to torch_eager")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    _figure.save(figure, arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

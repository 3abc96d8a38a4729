"""Figures: well-formed SVG, readability without color, and JSON round trips."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from hf_ctxmodels.analysis.figures import (
    ArcDiagram,
    AttentionView,
    BarChart,
    DotPlot,
    Figure,
    Heatmap,
    LineChart,
    ScatterMap,
    Surface,
    TokenComparison,
    can_write_png,
)
from hf_ctxmodels.analysis.figures.drawing import Scale, sequential_color, shorten
from hf_ctxmodels.analysis.figures.sentences import arc_levels

HOSTILE = ["</svg><script>alert(1)</script>", "\"'&", "שלום\u202e", "👩‍🚀", "a\x00\ud800b", "]]>"]
FIGURES: list[Figure] = [
    Heatmap("heat", "Scores", HOSTILE, ["0", "1"], [[0.125, None]] * 5 + [[1, float("nan")]], caption="<b>"),
    Heatmap("square", "Similarity", [f"<m> {i}" for i in range(50)], ["x", "y"], torch.eye(50)[:, :2]),
    LineChart(
        "line", "Curve", [1, 10, 100], {"a<": [0.1, None, 0.3], "b": np.ones(3)}, {"b": [(0, 2)] * 3}, log_x=True
    ),
    BarChart("bar", "Bars", HOSTILE, {"a": [-1, 0, 1, 2, 3, None], "b": [0.5] * 6}, "length"),
    DotPlot("dots", "Dots", HOSTILE, {"<p>": {"a<": [[1], [], [2, 300], [], [4], [5]]}}, {"<p>": {"b&": 7}}),
    ScatterMap("map", "Map", np.ones((6, 2)), HOSTILE, HOSTILE, HOSTILE, edges=[(0, 1, "dotted")]),
    ScatterMap("heads", "Heads", [(i % 3, i // 3) for i in range(6)], HOSTILE, HOSTILE, is_lattice=True),
    Surface("surface", "Loss", [0, 1, 2], [0, 1], [[0, 1, 2], [1, 2, None]], {"<run>": [(0, 0), (2, 1)]}),
    ArcDiagram("arcs", "Tree", HOSTILE, [(-1, 0, "root"), (0, 1, "<>")], [(1, 0, "")]),
    AttentionView("attention", "Attention", HOSTILE, torch.full((2, 3, 6, 6), 1 / 6)),
    TokenComparison("tokens", "Tokens", HOSTILE, {"log P <": [-1.5] * 6, "rank": [1, 20, 3, None, 5, 6]}, HOSTILE),
]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_svg_is_well_formed_and_json_round_trips(figure):
    svg = figure.svg()
    root = ElementTree.fromstring(svg)  # hostile strings cannot end an element or an attribute
    tags = {node.tag.rpartition("}")[2] for node in root.iter()}
    assert tags <= {"svg", "style", "rect", "text", "g", "title", "path", "circle", "line"}
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"].startswith(figure.title)
    assert not re.search(r"(?<!xmlns=\")https?://|nan|None", svg)
    assert "<style" not in figure.svg(embedded=True)
    restored = Figure.from_json(json.loads(json.dumps(figure.to_json(), allow_nan=False)))
    assert restored == figure
    assert restored.svg() == svg
    if can_write_png():
        assert figure.png().startswith(b"\x89PNG")


def test_line_chart_gaps():
    values = {"x": [1, 2, 4, 8], "series": {"a": [0, None, 1, None]}, "bands": {"a": [(0, 1), None, (0, 2), None]}}
    separate = LineChart("line", "Curve", **values).svg()
    joined = LineChart("line", "Curve", **values, join_gaps=True).svg()
    lines = [re.findall(r'<path d="([^"]*)" class="line-0"', text)[1:] for text in (separate, joined)]  # with a legend
    assert [[path.count("L") for path in paths] for paths in lines] == [[0, 0], [1]]
    areas = [re.findall(r'<path d="([^"]*)" class="fill-0"', text) for text in (separate, joined)]
    assert [[path.count("L") for path in paths] for paths in areas] == [[1, 1], [3]]


@pytest.mark.parametrize(("size", "has_markers"), [(60, True), (61, False)])
def test_long_curves_have_no_markers(size, has_markers):
    svg = LineChart("line", "Curve", list(range(size)), {"a": [0.5] * size}).svg()
    assert svg.count("<title>a, ") == (size if has_markers else 0)


def test_arcs_that_differ_from_the_gold_tree_are_dashed():
    gold, predicted = [(-1, 0, "root"), (0, 1, "a"), (0, 2, "b")], [(-1, 0, ""), (0, 1, ""), (1, 2, "")]
    svg = ArcDiagram("arcs", "Tree", ["x", "y", "z"], gold, predicted).svg()
    assert re.findall(r'stroke-dasharray="5 3"', svg) == ['stroke-dasharray="5 3"'], "one arc is different"
    assert "2 of 3 as above; others dashed" in svg


def test_dot_plot_axes():
    rows = [[0.1, 0.2], [], [0.4]]
    panels = {"linear": {"a": rows}, "log": {"a": [[1], [10], [100]], "b": [[], [1000], []]}}
    svg = DotPlot("dots", "Dots", ["x", "y", "z"], panels, {"linear": {"chance": 0.5}}).svg()
    circles = [float(x) for x in re.findall(r'<circle cx="([\d.]*)"', svg)][1:]  # after the legend
    squares = [float(x) for x in re.findall(r"translate\(([\d.]*) ", svg)][1:]
    (chance,) = (float(x) for x in re.findall(r'<path d="M([\d.]*) [\d.]*V', svg))
    linear, log = circles[:3], [*circles[3:], *squares]
    assert np.diff([*linear, chance]) == pytest.approx(
        [np.diff([*linear, chance]).sum() * w for w in (0.25, 0.5, 0.25)], abs=0.1
    )
    assert np.diff(log) == pytest.approx([np.diff(log).mean()] * 3, abs=0.1)


def test_numbers_that_are_not_finite_are_left_out():
    nan, values = float("nan"), [0.5, float("nan"), 1.0]
    bands = [(0.0, 1.0), (nan, nan), (0.5, nan)]
    svg = LineChart("line", "Curve", [0, 1, 2], {"a": values}, {"a": bands}).svg()
    assert svg == LineChart("line", "Curve", [0, 1, 2], {"a": values}, {"a": [bands[0], None, None]}).svg()
    dots, references = [[0.1, nan], [nan], [0.4]], {"linear": {"chance": 0.5, "majority": nan}}
    svg = DotPlot("dots", "Dots", ["x", "y", "z"], {"linear": {"a": dots}}, references).svg()
    finite = DotPlot("dots", "Dots", ["x", "y", "z"], {"linear": {"a": [[0.1], [], [0.4]]}}, references).svg()
    assert svg == finite


def visible_texts(figure: Figure) -> list[str]:
    return [node.text for node in ElementTree.fromstring(figure.svg()).iter() if node.tag.endswith("text")]


def test_numbers_are_readable_without_color():
    heatmap = Heatmap("h", "t", ["POS", "UUAS"], ["0", "1"], [[0.251, 1], [None, 0.5]])
    assert [text for text in visible_texts(heatmap) if text in ("0.25", "1.00", "0.50")][:3] == ["0.25", "1.00", "0.50"]
    assert {"-1.50", "20"} <= set(visible_texts(TokenComparison("t", "t", ["a"], {"p": [-1.5], "rank": [20]})))
    dash_patterns = re.findall(
        r'<path[^>]*stroke-dasharray="([^"]*)"', LineChart("l", "t", [0, 1], {n: [0, 1] for n in "abcde"}).svg()
    )
    assert len(set(dash_patterns)) == 4  # and a solid one


def test_standalone_svg_has_title_and_caption():
    heatmap = Heatmap("h", "Scores", ["a"], ["b"], [[1]], caption="Accuracy on the test sentences, by layer and task.")
    texts = " ".join(visible_texts(heatmap))
    assert "Scores" in texts
    assert all(word in texts for word in heatmap.caption.split())
    assert "Accuracy" not in re.sub('aria-label="[^"]*"', "", heatmap.svg(embedded=True))


def test_shortened_layer_labels_are_distinct():
    rows = [f"a-model-with-a-long-name, untrained {layer}" for layer in (0, 1, 12)]
    assert [shorten(row, 20) for row in rows] == [
        "a-model-with-a-lo… 0", "a-model-with-a-lo… 1", "a-model-with-a-l… 12"
    ]  # fmt: skip
    assert shorten("a  short\nname 3", 20) == "a short name 3"
    assert shorten("an ordinary sentence", 8) == "an ordi…"
    svg = Heatmap("a", "Layers", rows, rows, [[0.0] * 3] * 3).svg()
    assert len(set(re.findall(r">(a-model[^<]*)</text>", svg))) == 3


def test_wide_letters_get_more_room():
    for figure_of in (
        lambda name: Heatmap("h", "t", [name], ["0"] * 8, [[0.5] * 8]),
        lambda name: ArcDiagram("a", "t", [name] * 6, []),
    ):
        sizes = [ElementTree.fromstring(figure_of(letter * 10).svg()).attrib["width"] for letter in "xX語"]
        assert int(sizes[0]) < int(sizes[1]) < int(sizes[2])


def test_axis_scales_and_color_map():
    scale = Scale([0.13, 0.87], 100, 0)
    assert [text for _, text in scale.ticks()] == [f"0.{i}" for i in range(1, 10)]
    assert (scale(0.1), scale(0.9)) == (pytest.approx(100), pytest.approx(0))
    reverse = Scale([0, 4], 100, 0, reverse=True)
    assert [(value, reverse(value)) for value, _ in reverse.ticks()] == [(i, pytest.approx(25 * i)) for i in range(5)]
    assert [text for _, text in Scale([10, 1e4], 0, 90, log=True).ticks()] == ["10", "100", "1,000", "10,000"]
    assert Scale([10, 1e4], 0, 90, log=True)(100) == pytest.approx(30)
    with pytest.raises(ValueError, match="positive"):
        Scale([0, 1], 0, 1, log=True)
    lightness = [sum(int(sequential_color(step / 20)[0][i : i + 2], 16) for i in (1, 3)) for step in range(21)]
    assert sequential_color(0) == ("#440154", "#ffffff")
    assert lightness[1:] > lightness[:-1]


def test_contours_follow_surface():
    axis = np.linspace(-1, 1, 21)
    bowl = Surface("s", "t", axis, axis, axis[:, None] ** 2 + axis**2, {})
    points = [point for segment in bowl._contour_segments(0.5) for point in segment]
    assert len(points) > 40
    assert [x * x + y * y for x, y in points] == pytest.approx([0.5] * len(points), abs=0.01)


def test_bars_begin_at_zero():
    svg = BarChart("b", "t", ["p", "q"], {"a": [-1, 2], "b": [None, 1]}).svg()
    ticks = {float(text): float(x) for x, text in re.findall(r'<text x="([\d.]*)"[^>]*"middle">(-?[\d.]+)<', svg)}
    bar = r'<rect x="([\d.]*)" y="([\d.]*)" width="([\d.]*)"[^>]*><title>(.*)</title></rect>\n'
    number = r'<text x="([\d.]*)" y="([\d.]*)" class="[^"]*" text-anchor="(\w+)">([^<]*)<'
    bars = {}
    for x, y, width, name, text_x, text_y, text_anchor, text in re.findall(bar + number, svg):
        start, end = float(x), float(x) + float(width)
        assert name.endswith(f": {text}")
        assert 0 < float(text_y) - float(y) < 14
        is_left = float(text) < 0
        assert text_anchor == ("end" if is_left else "start")
        assert (start - float(text_x) if is_left else float(text_x) - end) > 0
        bars[name] = (start, end)
    expected = {"p, a: -1": (-1, 0), "q, a: 2": (0, 2), "q, b: 1": (0, 1)}
    assert bars == {name: pytest.approx([ticks[x] for x in ends], abs=0.02) for name, ends in expected.items()}


def map_points(svg: str) -> list[tuple[float, float]]:
    circle, transform = r'<circle cx="([\d.]*)" cy="([\d.]*)"', r'<path [^>]*transform="translate\(([\d.]*) ([\d.]*)\)"'
    matches = re.findall(rf'<g class="point"[^>]*>(?:{circle}|{transform})', svg)
    return [(float(a or c), float(b or d)) for a, b, c, d in matches]


def test_scatter_maps_have_equal_units():
    edges = [(0, 1, "dotted"), (1, 2, "solid")]
    svg = ScatterMap("m", "t", [(0, 0), (4, 0), (0, 2)], ["x", "x", "y"], ["i", "j", "k"], edges=edges).svg()
    pixels = map_points(svg)
    unit = (pixels[1][0] - pixels[0][0]) / 4
    assert unit > 50
    assert pixels[1] == (pixels[0][0] + 4 * unit, pixels[0][1])
    assert pixels[2] == pytest.approx((pixels[0][0], pixels[0][1] - 2 * unit))
    lines = re.findall(
        r'<path d="M([\d.]*) ([\d.]*)L([\d.]*) ([\d.]*)" class="axis"[^>]*?( stroke-dasharray="[^"]*")?/>', svg
    )
    assert [tuple(map(float, line[:4])) for line in lines] == [(*pixels[0], *pixels[1]), (*pixels[1], *pixels[2])]
    assert [bool(line[4]) for line in lines] == [True, False]
    assert re.findall(r'data-text="([^"]*)"', svg) == ["x: i", "x: j", "y: k"]


def test_rows_of_lattices_begin_at_the_top():
    cells = [(0, 0), (2, 0), (0, 3)]
    pixels = map_points(ScatterMap("m", "t", cells, ["x"] * 3, ["i"] * 3, is_lattice=True).svg())
    (x, y), spacing = pixels[0], (pixels[1][0] - pixels[0][0]) / 2
    assert spacing > 20
    assert pixels == [(x, y), pytest.approx((x + 2 * spacing, y)), pytest.approx((x, y + 3 * spacing))]


def test_labels_of_equal_points_do_not_overlap():
    """Two labels on each side of the point; further ones have no place."""
    points = [(0, 0)] * 5 + [(1, 1), (-1, -1)]
    svg = ScatterMap("m", "t", points, [""] * 7, [""] * 7, [*"abcde", "", "i"]).svg()
    labels = {
        text: (float(x), float(y))
        for x, y, text in re.findall(r'<text x="([\d.]*)" y="([\d.]*)" class="ink halo"[^>]*>(\w)<', svg)
    }
    assert list(labels) == [*"abcd", "i"]
    assert svg.count("<circle") == len(points), "a single group without a name has no legend"
    (x, y), width = map_points(svg)[0], 10
    assert x < labels["a"][0] == labels["c"][0] < x + width
    assert x - 2 * width < labels["b"][0] == labels["d"][0] < x
    assert abs(labels["a"][1] - y) < 8
    assert labels["b"][1] == labels["a"][1] < labels["c"][1] == labels["d"][1]


def test_labels_of_heat_maps_are_beside_their_cells():
    root = ElementTree.fromstring(Heatmap("h", "t", ["first", "second"], ["x", "y"], [[0.125, 0.25], [0.5, 1]]).svg())
    groups = [node for node in root.iter() if node.tag.endswith("}g")]
    cells = {}
    for rect, number, _ in groups:
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x < float(number.attrib["x"]) < x + width
        cells[number.text] = (x, x + width, y, y + height)
    labels = {
        node.text: (float(node.attrib["x"]), float(node.attrib["y"]), node.attrib["text-anchor"])
        for node in root.iter()
        if node.text in ("first", "second", "x", "y")
    }
    for row, number in (("first", "0.12"), ("second", "0.50")):
        left, _, top, bottom = cells[number]
        x, y, anchor = labels[row]
        assert (x < left, top < y < bottom, anchor) == (True, True, "end")
    for column, number in (("x", "0.12"), ("y", "0.25")):
        left, right, top, _ = cells[number]
        x, y, anchor = labels[column]
        assert (x, y < top, anchor) == (pytest.approx((left + right) / 2), True, "middle")


def test_colors_of_surfaces():
    """The lowest y is at the bottom; a color bar has the colors from the lowest to the highest value."""
    svg = Surface("s", "t", [0, 1, 2], [0, 1], [[0, None, 1], [1, 1, 0]], {}).svg()
    lowest, highest = (sequential_color(value)[0] for value in (0, 1))
    names = {f'fill="{lowest}"': "lowest", f'fill="{highest}"': "highest", 'class="empty"': "empty"}
    colors = {}
    for data, name in re.findall(r'<path d="([^"]*)" ((?:class|fill)="[^"]*")/>', svg):
        for column, row, length in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", data):
            colors |= {(int(row), int(column) + i): names[name] for i in range(int(length))}
    rows = [[colors[row, column] for column in range(3)] for row in range(2)]
    assert rows == [["highest", "highest", "lowest"], ["lowest", "empty", "highest"]]
    bar = re.findall(r'<rect x="[^"]*" y="[^"]*" width="[^"]*" height="9[^"]*" fill="([^"]*)"', svg)
    assert bar == [sequential_color(i / 39)[0] for i in range(40)]


def test_overlapping_arcs_differ_in_height():
    arcs = [(1, 0, ""), (4, 1, ""), (3, 2, ""), (4, 3, ""), (-1, 4, ""), (4, 5, "")]
    assert arc_levels(arcs) == [0, 1, 0, 0, 2, 0]


def test_arcs_of_mirrored_sentence_are_mirrored():
    """An arc leads from a position beside the center of the head to one beside the center of the dependent."""
    arcs = [(1, 0, ""), (1, 4, ""), (4, 2, ""), (2, 3, "")]

    def draw(arcs: list[tuple[int, int, str]]) -> tuple[list[float], np.ndarray]:
        svg = ArcDiagram("arcs", "Tree", ["word"] * 5, arcs).svg()
        centers = [float(x) for x in re.findall(r'<text x="([\d.]*)"[^>]*>word<', svg)]
        paths = [re.findall(r"[\d.]+", path) for path in re.findall(r'<path d="([^"]*)" class="ink-line"', svg)]
        tips = [float(x) for x in re.findall(r'<path d="M([\d.]*) [^"]*z" class="ink"', svg)]
        x = np.array(paths, dtype=float)[:, [0, 2, 4, 6, 7, 9]]  # of "M x y Q x y x y H x Q x y x y"
        assert x[:, -1].tolist() == tips
        return centers, x

    centers, x = draw(arcs)
    for (head, dependent, _), positions in zip(arcs, x, strict=True):
        direction = np.sign(dependent - head)
        assert 0 < direction * (positions[0] - centers[head]) < 8
        assert 0 < direction * (centers[dependent] - positions[-1]) < 8
        assert (np.diff(positions) * direction >= 0).all()
    _, mirrored_x = draw([(4 - head, 4 - dependent, "") for head, dependent, _ in arcs])
    np.testing.assert_allclose(x + mirrored_x, centers[0] + centers[-1], atol=0.21)


@pytest.mark.parametrize(
    ("make_figure", "message"),
    [
        (lambda: Heatmap("h", "t", ["a"], ["b"], [[1, 2]]), "expected 1 rows of 1 values"),
        (lambda: LineChart("l", "t", [1, 2], {"a": [1]}), "lengths of x and the series 'a' differ: 2, 1"),
        (lambda: DotPlot("d", "t", ["x"], {"p": {"a": []}}), "the labels and the series 'a' of 'p' differ: 1, 0"),
        (lambda: DotPlot("d", "t", ["x"], {"p": {}}, {"q": {"chance": 1}}), "no panels with the titles q"),
        (lambda: ScatterMap("m", "t", [(0, 1)], ["g"], ["t"], edges=[(0, 1, "solid")]), "not an edge between 1 points"),
        (lambda: ArcDiagram("a", "t", ["a"], [(1, 0, "")]), "not an arc between 1 words"),
        (lambda: Heatmap("../h", "t", [], [], []), "not a name of a figure"),
        (lambda: Figure.from_json({"type": "Pie"}), "'Pie' is not a figure"),
    ],
)
def test_invalid_data_raises(make_figure, message):
    with pytest.raises(ValueError, match=message):
        make_figure()


@pytest.mark.parametrize("values", [[-5.0, 1.0], [-3.0, -2.0], [0.5, 4.0]])
def test_scale_without_padding_ends_at_extreme_values(values: list[float]) -> None:
    scale = Scale(values, 10, 90, pad=False)
    assert [scale(value) for value in values] == pytest.approx([10, 90])

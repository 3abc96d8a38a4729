"""Figures of the analyses: data classes that draw themselves as SVG, without a browser or a plotting library.

figure = LineChart("accuracy", "Accuracy by layer", x=[0, 1, 2], series={"POS": [0.7, 0.8, 0.9]}, x_label="layer")
figure.svg()  # a document, or an element of a page with embedded=True
figure.png()  # with the extra `figures`
"""

from hf_ctxmodels.analysis.figures.base import Figure, can_write_png, plain, require_shape
from hf_ctxmodels.analysis.figures.charts import BarChart, DotPlot, LineChart, ScatterMap
from hf_ctxmodels.analysis.figures.drawing import escape_text, figure_style, format_value
from hf_ctxmodels.analysis.figures.grids import Heatmap, Surface
from hf_ctxmodels.analysis.figures.sentences import ArcDiagram, AttentionView, TokenComparison

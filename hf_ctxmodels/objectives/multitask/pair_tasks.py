"""Semantic-aware tasks, on labelled pairs (Sun et al. 2020, section 4.2.3)."""

from hf_ctxmodels.objectives.multitask.task import PairTask


class DiscourseRelation(PairTask):
    """Predict the relation of two sentences, such as the connective that was between them."""

    name = "discourse_relation"


class QueryTitleRelevance(PairTask):
    """Predict how a title fits a query: chosen by the user, shown but not chosen, or neither."""

    name = "query_title"

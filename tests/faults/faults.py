"""The faults: each a line of the package changed as a slip would change it, and the tests that must catch it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault to plant.

    Attributes:
        what: What is wrong then.
        file: Of the package.
        right: Text that stands in the file once.
        wrong: What stands there in its place.
        tests: The files that pytest is asked to run, from the root of the repository.
        keyword: Which tests of them: pytest's -k.
    """

    what: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    keyword: str = ""

    def planted(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: The right text does not stand there exactly once.
        """
        if (count := text.count(self.right)) != 1:
            raise ValueError(f"{self.file}: {self.right!r} stands there {count} times, expected once.")
        return text.replace(self.right, self.wrong)


FAULTS = [
    Fault(
        "scores are not scaled",
        "hf_ctxmodels/layers/attention/reference.py",
        "scores = query @ key.transpose(2, 3) * scaling",
        "scores = query @ key.transpose(2, 3)",
        ("tests/layers/test_attention.py",),
    ),
    Fault(
        "a window is one wider",
        "hf_ctxmodels/layers/attention/masks.py",
        "(queries - keys).abs() < self.window",
        "(queries - keys).abs() <= self.window",
        ("tests/layers/test_attention_masks.py",),
    ),
    Fault(
        "a prefix is one longer",
        "hf_ctxmodels/layers/attention/masks.py",
        "seen | (keys < prefix)",
        "seen | (keys <= prefix)",
        ("tests/layers/test_attention_masks.py",),
    ),
    Fault(
        "far distances begin one bucket early",
        "hf_ctxmodels/layers/attention/position_bias.py",
        "far = exact + (",
        "far = exact - 1 + (",
        ("tests/layers/test_attention_masks.py",),
    ),
    Fault(
        "distance zero counts as behind",
        "hf_ctxmodels/layers/attention/position_bias.py",
        "bucket + size * (relative > 0)",
        "bucket + size * (relative >= 0)",
        ("tests/layers/test_attention_masks.py",),
    ),
    Fault(
        "sequences of a row run into one",
        "hf_ctxmodels/layers/attention/layouts.py",
        "starts[1:] = numbers[1:] != numbers[:-1]",
        "starts[1:] = numbers[1:] < numbers[:-1]",
        ("tests/layers/test_varlen.py",),
    ),
    Fault(
        "a wrapped projection is sliced from the start",
        "hf_ctxmodels/layers/linear.py",
        "return module(input)[..., start:stop]",
        "return module(input)[..., : stop - start]",
        ("tests/layers/test_linear.py",),
    ),
    Fault(
        "a bias's gradient is a mean",
        "hf_ctxmodels/layers/linear.py",
        "grad.sum(0) if wants_bias else None",
        "grad.mean(0) if wants_bias else None",
        ("tests/layers/test_linear.py",),
    ),
    Fault(
        "post-norm is applied before the sum",
        "hf_ctxmodels/layers/transformer/block.py",
        'return norm(total) if self.norm == "post" else total',
        "return total",
        ("tests/models/test_common_reference.py",),
        "bert and TestOpening and test_outputs",
    ),
    Fault(
        "the mean counts padding",
        "hf_ctxmodels/layers/pooling.py",
        "((states.float() * there).sum(1) / there.sum(1))",
        "((states.float() * there).sum(1) / states.shape[1])",
        ("tests/models/test_sentences.py",),
        "means",
    ),
    Fault(
        "the maximum includes padding",
        "hf_ctxmodels/layers/pooling.py",
        "states.masked_fill(~there, torch.finfo(states.dtype).min).amax(1)",
        "states.amax(1)",
        ("tests/models/test_infersent.py",),
    ),
    Fault(
        "the last column is one too early",
        "hf_ctxmodels/layers/positions.py",
        "return states.shape[1] - 1 - first_columns",
        "return states.shape[1] - 2 - first_columns",
        ("tests/models/test_seqae.py",),
    ),
    Fault(
        "the mix forgets its scale",
        "hf_ctxmodels/layers/scalar_mix.py",
        "self.weights.float().softmax(0) * self.gamma",
        "self.weights.float().softmax(0)",
        ("tests/models/test_common_training.py",),
        "elmo and every_parameter",
    ),
    Fault(
        "the backward direction starts one token late",
        "hf_ctxmodels/layers/recurrent/packing.py",
        "ranks = [rank, lengths[number] - 1 - rank][:directions]",
        "ranks = [rank, lengths[number] - rank][:directions]",
        ("tests/layers/test_recurrent.py",),
    ),
    Fault(
        "the state is not in the order of the rows",
        "hf_ctxmodels/layers/recurrent/packing.py",
        "part.transpose(0, 1)[:, self.order]",
        "part.transpose(0, 1)",
        ("tests/layers/test_recurrent.py",),
    ),
    Fault(
        "a state carried on is not zero at first",
        "hf_ctxmodels/layers/recurrent/lstm.py",
        "each[:, : stretch[0]].detach()",
        "each[:, : stretch[0]]",
        ("tests/layers/test_recurrent.py",),
        "trunc",
    ),
    Fault(
        "log-uniform draws are off by one",
        "hf_ctxmodels/layers/lm_loss/sampled.py",
        "(1 / (ids.double() + 1)).log1p()",
        "(1 / (ids.double() + 2)).log1p()",
        ("tests/objectives/test_bidirectional_lm.py",),
    ),
    Fault(
        "draws of successive places are the same",
        "hf_ctxmodels/layers/lm_loss/sampling.py",
        "(places + 1) * _STEP",
        "(places * 0 + 1) * _STEP",
        ("tests/layers/test_sampling.py",),
    ),
    Fault(
        "ignored targets are counted",
        "hf_ctxmodels/heads/base.py",
        "count = (targets != IGNORED).sum().clamp(min=1) if",
        "count = torch.as_tensor(targets.numel()) if",
        ("tests/models/test_common_training.py",),
        "bert and full_logits",
    ),
    Fault(
        "a larger batch's count is ignored",
        "hf_ctxmodels/heads/base.py",
        "count = counts.get(name) if isinstance(counts, Mapping) else counts",
        "count = counts.get(name) if isinstance(counts, Mapping) else None",
        ("tests/models/test_common_training.py",),
        "Accumulation and bert",
    ),
    Fault(
        "the difference of two texts has a sign",
        "hf_ctxmodels/heads/text_pairs.py",
        "(first - second).abs()",
        "(first - second)",
        ("tests/models/test_infersent.py",),
    ),
    Fault(
        "start and end are added",
        "hf_ctxmodels/heads/downstream.py",
        "loss = (start + end) / 2",
        "loss = start + end",
        ("tests/models/test_common_training.py",),
        "bert and QuestionAnswering and full_logits",
    ),
    Fault(
        "one term is left out of the sum",
        "hf_ctxmodels/heads/masked_lm.py",
        "torch.stack([*terms.values()]).sum() if terms",
        "torch.stack([*terms.values()])[0] if terms",
        ("tests/models/test_common_training.py",),
        "bert and AutoModelForPreTraining",
    ),
    Fault(
        "a shared owner is the first of all",
        "hf_ctxmodels/models/albert/sharing.py",
        "owner = number - number % depths_per_group",
        "owner = number % depths_per_group * 0",
        ("tests/layers/test_sharing.py",),
    ),
    Fault(
        "masks are drawn with replacement",
        "hf_ctxmodels/objectives/common/masking.py",
        "self.budget(len(positions)), replace=False",
        "self.budget(len(positions)), replace=True",
        ("tests/objectives/test_masking.py",),
    ),
    Fault(
        "no token may be predicted of a short row",
        "hf_ctxmodels/objectives/common/masking.py",
        "count = max(1, round(",
        "count = max(0, round(",
        ("tests/objectives/test_masking.py",),
    ),
    Fault(
        "packed sequences begin at zero",
        "hf_ctxmodels/objectives/common/packing.py",
        "np.arange(1, len(rows) + 1",
        "np.arange(0, len(rows)",
        ("tests/objectives/test_masked_lm.py",),
    ),
    Fault(
        "a word ends where its id changes alone",
        "hf_ctxmodels/objectives/common/spans.py",
        "(np.diff(words) != 0) | (np.diff(positions) != 1)",
        "(np.diff(words) != 0)",
        ("tests/objectives/test_spans.py",),
    ),
    Fault(
        "every epoch has one order",
        "hf_ctxmodels/data/epochs.py",
        "generator(self.seed, epoch, 0, Stream.ORDER)",
        "generator(self.seed, 0, 0, Stream.ORDER)",
        ("tests/data/test_examples.py",),
    ),
    Fault(
        "the seed is ignored",
        "hf_ctxmodels/data/epochs.py",
        "generator(self.seed, epoch, 0, Stream.ORDER)",
        "generator(0, epoch, 0, Stream.ORDER)",
        ("tests/data/test_examples.py",),
    ),
    Fault(
        "examples of a mixture lose their part",
        "hf_ctxmodels/data/mixtures.py",
        "self.parts[part][index - self.starts[part]]",
        "self.parts[0][index - self.starts[part]]",
        ("tests/data/test_mixtures.py",),
    ),
    Fault(
        "a step does not clear its gradients",
        "hf_ctxmodels/training/steps.py",
        "        self._optimizer.zero_grad()\n",
        "        pass\n",
        ("tests/training/test_loop.py",),
    ),
    Fault(
        "every process divides by all targets",
        "hf_ctxmodels/training/steps.py",
        "counts[i].clamp(min=1) / processes",
        "counts[i].clamp(min=1)",
        ("tests/training/test_faults.py",),
        "two_processes",
    ),
    Fault(
        "biases are decayed",
        "hf_ctxmodels/training/optim/optimization.py",
        "if parameter.ndim >= 2]",
        "if parameter.ndim >= 1]",
        ("tests/training/test_parts.py",),
        "decay",
    ),
    Fault(
        "lower layers learn faster",
        "hf_ctxmodels/training/optim/discriminative_lr.py",
        "learning_rate / decay **",
        "learning_rate * decay **",
        ("tests/training/test_depth.py",),
        "rates",
    ),
    Fault(
        "all layers are trained from the start",
        "hf_ctxmodels/training/optim/discriminative_lr.py",
        "min(len(self._groups), 1 + step // self._interval)",
        "min(len(self._groups), 2 + step // self._interval)",
        ("tests/training/test_depth.py",),
        "unfrozen",
    ),
    Fault(
        "similarity is no cosine",
        "hf_ctxmodels/analysis/word_relations.py",
        "torch.nn.functional.normalize(torch.from_numpy(vectors.matrix).to(device), dim=1)",
        "torch.from_numpy(vectors.matrix).to(device)",
        ("tests/analysis/test_words.py",),
    ),
]

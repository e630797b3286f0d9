"""A survey as a list of stages, each made from the states of those before it, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.jobs.job import Stage, States
from theodolite.logits.attribution import AttributionPass, PatternPass
from theodolite.logits.shares import SharesPass, sample_of
from theodolite.measure.catalogue import taken
from theodolite.measure.extra import Extra, check_extra
from theodolite.models import OpenModel
from theodolite.models.token_texts import text_of_tokens
from theodolite.passes.chunks import TextInChunks
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of
from theodolite.passes.provenance import describe_corpus, describe_model, describe_pass
from theodolite.passes.run import Run
from theodolite.passes.run_job import run_into
from theodolite.passes.survey_pass import EXAMPLES, SurveyPass, choose_sample
from theodolite.passes.tabulate import Facts, added_columns, survey_means, tabulate
from theodolite.passes.weights_pass import WeightsPass
from theodolite.system.progress import ShowStage

TEXT, TEXT_TITLE = "corpus", "reading contexts"
WEIGHTS_TITLE = "reading weights"
PATTERNS_TITLE = "scoring head types"
"""What is said while stages run that other jobs have too."""


@dataclass(frozen=True)
class SurveyPlan:
    """A model, a text and the options of a survey: what decides the result.

    Attributes:
        batch: contexts a forward pass; None: 4096 tokens' worth.
        seed: of the kept sample and of the random sequences for induction.
        extra: accumulators of the caller's.

    Raises:
        UsageError: the corpus does not fit the model, or an accumulator does not fit the survey.
    """

    model: OpenModel
    corpus: Corpus
    batch: int
    seed: int
    extra: Sequence[Extra]

    @classmethod
    def of(
        cls, model: OpenModel, corpus: Corpus, batch: int | None, seed: int, extra: Sequence[Extra]
    ) -> SurveyPlan:
        """Check the arguments of a survey; the default batch follows from the corpus."""
        check_fit(model, corpus)
        model.check_weights()
        check_extra(extra, taken)
        return cls(model, corpus, batch_of(corpus, batch), seed, extra)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides every byte of the survey."""
        added = {"extra": [accumulator.name for accumulator in self.extra]} if self.extra else {}
        text = {"corpus": self.corpus.sha256, "batch": self.batch, "seed": self.seed}
        return {**fingerprint_of(self.model), **text, **added}

    def new_pass(self) -> SurveyPass:
        """Return a pass that has read nothing yet."""
        return SurveyPass(self.model, self.corpus, self.seed, self.batch, self.extra)

    def stages(self) -> list[Stage]:
        """List all stages in order; only the first one's cost grows with the text."""
        model, corpus, seed = self.model, self.corpus, self.seed
        trailing = trailing_special_tokens(model.tokenizer, corpus.contexts, corpus.lengths)

        def text(states: States) -> TextInChunks:
            return TextInChunks(self.new_pass, states.work)

        def means(states: States) -> tuple[Tensor, Tensor]:
            mean, pos, _ = survey_means(states, trailing, corpus.leading)
            return mean, pos.float()  # as the run has it, so that its readers get the same parts

        def shares(states: States) -> SharesPass:
            added_columns(states, self.extra)  # those that do not fit are refused now, and not at the end
            return SharesPass(model, corpus, seed, *means(states))

        def weights(states: States) -> WeightsPass:
            mean, pos = means(states)
            words = slice(pos.shape[1] - trailing)
            return WeightsPass(
                model,
                inputs=states.of(f"{TEXT}.inputs"),
                mean=mean,
                pos=pos[:, words],
                normed=states.of("shares")["normed"][:, words],
                leading=corpus.leading,
                grid=None if corpus.grid is None else corpus.grid.shape,
            )

        def patterns(states: States) -> PatternPass:
            return PatternPass(model, corpus.contexts.shape[1], seed)

        def attribution(states: States) -> AttributionPass:
            return AttributionPass(model, seed, states.of("patterns")["scores"], *means(states))

        return [
            Stage(TEXT, TEXT_TITLE, text),
            Stage("shares", "splitting logits", shares),
            Stage("weights", WEIGHTS_TITLE, weights),
            Stage("patterns", PATTERNS_TITLE, patterns),
            Stage("attribution", "attributing patterns", attribution),
        ]

    def run(self, out: str | Path | None, checkpoint_seconds: float, show_progress: ShowStage) -> Run:
        """Run all stages and make the tables; errors are those of `run_into`."""
        return run_into(
            self.stages(),
            self.tables,
            out,
            self.fingerprint,
            corpus=describe_corpus(self.corpus),
            checkpoint_seconds=checkpoint_seconds,
            show_progress=show_progress,
        )

    def tables(self, states: States) -> Run:
        """Make the run from the states of all stages."""
        return tabulate(states, facts_of(self.model, self.corpus, self.seed, self.fingerprint), self.extra)


def facts_of(model: OpenModel, corpus: Corpus, seed: int, fingerprint: dict[str, Any]) -> Facts:
    """Describe the model and the text, for the tables."""
    described = describe_pass(model, corpus, seed, fingerprint)
    trailing = described["corpus"]["trailing_special_tokens"]
    sample = choose_sample(corpus, trailing, (model.layers + 1) * model.width, seed)
    described["counts"] |= {
        "sampled_contexts": sample.size,
        "split_contexts": len(sample_of(corpus, seed)),
    }
    examples = corpus.contexts[:EXAMPLES]
    pictures = None
    if corpus.images is not None:
        pictures = corpus.images.reader.shown(corpus.images.pixels(slice(0, len(examples))))
    return Facts(
        provenance=describe_model(model) | described,
        text=text_of_tokens(model, corpus),
        sample=sample,
        labels=corpus.labels,
        examples=examples,
        pictures=pictures,
    )

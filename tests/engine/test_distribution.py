"""C68 through the engine: tokens of many seeds follow the distribution that the parameters name.

20,000 draws of each kind are put to the sampler itself in tests/model/test_sampler.py; here a few
hundred requests of one token show that nothing on the way mixes up rows, draws or parameters.
"""

from __future__ import annotations

import asyncio

import numpy as np
from engines import prompt, small_engine
from sampling_reference import kept_probabilities, logits_of
from scipy import stats

from aiosched import SamplingParams
from aiosched.testing.hash_model import HashModel

MODEL = HashModel(12, logit_scale=1 / 1024)
PROMPT = prompt(3, 5, vocab_size=12)
DRAWS = 120
KINDS = [
    {"temperature": temperature, **field}
    for temperature in (0.5, 1.0, 2.0)
    for field in ({}, {"top_p": 0.7}, {"top_k": 6}, {"min_p": 0.3})
]


def test_tokens_of_many_seeds_follow_the_filtered_distribution(vrun):
    asks = [
        SamplingParams(**kind, max_tokens=1, seed=DRAWS * i + draw)
        for draw in range(DRAWS)
        for i, kind in enumerate(KINDS)  # kinds take turns: a batch holds all of them
    ]

    async def main():
        async with small_engine(MODEL, overlap_depth=2, max_running_requests=64) as engine:
            answers = await asyncio.gather(*(engine.complete(PROMPT, params) for params in asks))
            return [answer.token_ids[0] for answer in answers]

    drawn = np.array(vrun(main())).reshape(DRAWS, len(KINDS)).T
    for kind, tokens in zip(KINDS, drawn, strict=True):
        p = kept_probabilities(logits_of(MODEL, PROMPT), SamplingParams(**kind))
        counts, expected = np.bincount(tokens, minlength=12), DRAWS * p / p.sum()
        assert not counts[expected == 0].any(), kind
        kept = np.flatnonzero(expected)
        kept = kept[np.argsort(-expected[kept])]
        rare = np.flatnonzero(expected[kept][::-1].cumsum()[::-1] < 5)  # chi-square needs five
        cells = np.arange(len(kept))
        cells[rare] = max(len(kept) - len(rare) - 1, 0)  # they join the next more frequent one
        seen = np.bincount(cells, counts[kept])
        wanted = np.bincount(cells, expected[kept])
        assert len(wanted) > 1, "a distribution worth the test"
        assert stats.chisquare(seen, wanted).pvalue > 1e-3, kind

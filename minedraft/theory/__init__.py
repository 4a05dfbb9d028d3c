"""Closed forms of speculative decoding (SD) and batch-parallel speculative decoding (PSD).

* `tokens`: tokens per round from acceptance, and rounds per answer;
* `stages`: the seconds of a round, T_SD, T_PSD and the gain at equal k;
* `jitter`: the same with random stage times;
* `fairness`: per device, per request, and against a sequential batch of equally many requests;
* `star`: one drafter shared by n targets;
* `draft_length`: each mode's own best k;
* `theorem`: the model of Theorem 1 of the paper, its exact ratio, and where the theorem fails.

"The paper" is MineDraft, arXiv 2603.18016v1. Everywhere m is the number of requests per verification, k that of drafts
per request, V and t the seconds of a verification and of drafting, o the seconds of a round that nothing hides.

Law of this package: functions of numbers, no world, no state; the standard library only, but for `theorem` and
`draft_length`, which import scipy when they are called (extra `theory`).
"""

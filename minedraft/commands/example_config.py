"""The configuration file that says all that holds by default (`EXAMPLE`); a test keeps it true."""

from __future__ import annotations

from typing import Final

EXAMPLE: Final = """\
# A run of minedraft. Everything may be left out; what stands here are the defaults, in comments the alternatives.
# Run it:  minedraft simulate FILE     minedraft compare FILE --mode sd --mode psd
# All times are seconds.

mode = "psd"                    # ar: no drafting; sd: draft, then verify; psd: batches that take turns;
                                # simulated only: pearl, pearl-minedraft (the same, off by one)
seed = 0

[scheduler]
max_batch_size = 16             # requests per batch, so per verification
# num_batches = 2               # psd only
num_speculative_tokens = 3      # largest k
max_num_batched_tokens = 8192   # per verification, prompt chunks included
block_size = 16
# num_target_blocks = 65536     # KV pool in blocks: follows from the cost model's GPUs unless given
# num_draft_blocks = 65536      # follows from the cost model's GPUs unless given
kv_watermark = 0.01
max_verify_failures = 3
# max_num_seqs, max_num_draft_batched_tokens, draft_capacity, max_model_len, draft_max_model_len

[policies]                      # a name, package.module:Class, or a table with options
admission = "fcfs"              # priority, shortest-prompt
assignment = "fewest-requests"  # least-tokens, in-phase
rebalance = "split-on-empty"    # never, { name = "keep-within", difference = 2 }
draft_length = "fixed"          # { name = "fixed", k = 2 }, { name = "by-batch-size", table = "8:5/16:3" }
selection = "all"               # tetris, tetris-unbiased; they need scheduler.draft_capacity
preemption = "newest"           # cost-aware

[workload]
kind = "synthetic"              # azure-conv-like, azure-code-like, trace
num_requests = 200
arrivals = "at-once"            # { kind = "poisson", rate = 4.0 }, { kind = "gamma", rate = 4.0, cv = 2.0 },
                                # { kind = "on-off", rate = 4.0, on_s = 5.0, off_s = 15.0 },
                                # { kind = "closed-loop", concurrency = 32 }
prompt_lens = 64                # { kind = "lognormal", mean = 300, p50 = 200, max_tokens = 4000 },
output_lens = 256               # { kind = "empirical", path = "lengths.csv", column = "output" },
                                # { parts = [{ weight = 0.9, length = 200 }, { weight = 0.1, length = 32000 }] }
# max_tokens = 512              # the user's limit; without it each request's limit is its length
# aborts = { probability = 0.1, mean_patience_s = 5.0 }
# A trace instead:  kind = "trace", path = "trace.csv", format = "azure" (mooncake, sharegpt, jsonl), time_scale = 1.0

[cost]                          # seconds per step
kind = "paper"                  # medians of arXiv 2603.18016, Fig. 25
drafter = "qwen3-1.7b"          # qwen3-0.6b, qwen3-4b
# kind = "constant"             # verify_base_s = 0.0493, draft_base_s = 0.0495, prefill_s = 0.06, ...
# kind = "linear"               # verify_base_s, verify_per_seq_s, verify_per_token_s, verify_per_context_token_s,
                                # and the same for prefill_, draft_ and draft_prefill_
# kind = "roofline"             # or measured (pip install minedraft[timing])
# target = { model = "qwen3-32b", gpu = "h100", tp = 4 }
# draft = { model = "qwen3-0.6b", gpu = "h100" }
# kind = "profile"              # target = { path = "times.json" }, and the same for draft

[acceptance]
kind = "constant"
alpha = 0.7
# synthetic_acceptance_rates = [0.7, 0.5, 0.3]   # as in vLLM: unconditional, one per speculative token
# synthetic_acceptance_length = 2.5              # as in vLLM: tokens per round, the bonus token included
# kind = "beta"                                  # mean = 0.7, concentration = 5.0: each request has its own rate
# kind = "rising"                                # first = 0.6, limit = 0.8: easy stretches survive into later slots
# kind = "preset"                                # name = "qwen3-8b-eagle3-math": published figures
# kind = "log"                                   # path = "run.jsonl", by_id = false: a recorded log, or a journal
# draft_probs = true                             # reported to selection policies

[devices]
# num_target_devices = 4        # follows from the cost model's GPUs unless given
# num_draft_devices = 1         # follows from the cost model's GPUs unless given; where the drafter has its own
round_overhead_s = 0.0          # host time per verification
# colocated = true              # the drafter shares the target's devices; by default in sd only
# num_replicas = 3              # targets that share the one drafter; [scheduler] and num_target_devices are of each
# router = "least-requests"     # who gives requests to replicas; by default "round-robin"

[drafting]                      # by default a draft model, or what cost.draft.model is a head for
parallel_drafting = false       # all k tokens in one pass
# method = "ngram"              # lookup on the host, match_rate = 0.54; draft_model, eagle, eagle3, mtp

# [link]                        # between target and drafter; left out, nothing takes time
# preset = "pcie4-x16"          # pcie5-x16, nvlink3, nvlink4, ib-ndr, ethernet-100g, shared-memory, unix-socket;
                                # or latency_s and bytes_per_s
# payload = "token_ids"         # draft_probs; target_probs (rejection sampling at the drafter: arXiv 2603.18016)

[faults]
draft_failure_rate = 0.0
verify_failure_rate = 0.0
# outages = [{ at_s = 10.0, duration_s = 5.0 }]
# pauses = [{ device = "target", at_s = 10.0, duration_s = 0.5 }]

# [slo]                         # milliseconds; reports request_goodput
# ttft_ms = 500

# For `minedraft compare`: any number of these, each with what differs.
# [[variants]]
# name = "sd with twice the batch"
# mode = "sd"
# scheduler = { max_batch_size = 32 }
"""

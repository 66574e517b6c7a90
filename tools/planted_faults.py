"""Do the tests of `make test` find faults? Plants small ones, one at a time, and runs what should.

    python -m tools.planted_faults [--only WORD] [--below FOLDER] [--tests all] [--at-once] [--list]

Each fault is an edit of one line in a copy of the tree; the tests named with it are run there as
`make test` runs them, or with `--tests all` the long ones too. Faults are of the kind that reviews
miss: a bound that is off by one, a factor left out, a check that is gone. Where one is missed, a
test is missing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("lightserve", "tests", "bench", "tools", "docs", "examples", "requirements", "docker")
FILES = ("pyproject.toml", "setup.py", "Makefile", "README.md", "CHANGELOG.md", "LICENSE")
PRELOADED = (
    "torch",
    "numpy",
    "hypothesis",
    "msgspec",
    "pydantic",
    "starlette",
    "httpx",
    "zmq",
    "click",
)
TIMES_S = itertools.count(1_000_000_000)
"""When files were changed: a fault and what is right may be equally long and a moment apart, and by
its own time each is told from the bytecode of the other."""
FOUND, MISSED = 1, 0
"""Exit codes of pytest."""


class Fault(NamedTuple):
    """One line that is wrong."""

    path: str
    """Below lightserve/."""
    right: str
    """Stands in the file exactly once."""
    wrong: str
    tests: tuple[str, ...]
    """Files below tests/."""


def fault(path: str, right: str, wrong: str, *tests: str) -> Fault:
    """Return a fault and who should find it."""
    return Fault(path, right, wrong, tests)


ROUTER = [
    fault(
        "router/slo.py",
        "max(0.0, self._mtpot_s - self._tpot_s) if",
        "max(0.0, self._mtpot_s) if",
        "unit/router/test_slo.py",
    ),
    fault(
        "router/slo.py",
        "kept.is_first_met = now_s <= deadline_s",
        "kept.is_first_met = now_s < deadline_s",
        "unit/router/test_slo.py",
    ),
    fault(
        "router/slo.py",
        "_num_to_come -= num_tokens",
        "_num_to_come -= 1",
        "unit/router/test_slo.py",
    ),
    fault(
        "router/slo.py",
        "raised[name] = FEASIBLE_FACTOR * least",
        "raised[name] = least",
        "unit/router/test_slo.py",
        "unit/router/test_scheduling_targets.py",
    ),
    fault(
        "router/request_table.py",
        "counts[(generated >= self.stop_at)",
        "counts[(generated > self.stop_at)",
        "unit/router/test_request_table.py",
        "sim/test_core_answers.py",
        "sim/test_core_properties.py",
    ),
    fault(
        "router/request_table.py",
        "ends = self.num_output[rows] + 1 >= self.max_tokens[rows]",
        "ends = self.num_output[rows] >= self.max_tokens[rows]",
        "unit/router/test_request_table.py",
        "sim/test_core_properties.py",
    ),
    fault(
        "router/queue.py",
        "return self._num_since >= OLDEST_EVERY - 1",
        "return self._num_since >= OLDEST_EVERY",
        "unit/router/test_queue.py",
        "unit/router/test_look_ahead.py",
    ),
    fault(
        "router/queue.py",
        "put_back.move_to_end(request.key, last=False)",
        "put_back.move_to_end(request.key, last=True)",
        "unit/router/test_queue.py",
        "unit/router/test_pipeline.py",
    ),
    fault(
        "router/queue.py",
        "head.deadlines.residual(now_s) > 0:",
        "head.deadlines.residual(now_s) > -1.0:",
        "unit/router/test_queue.py",
    ),
    fault(
        "router/queue.py",
        "for fresh in self._fresh[BE].in_turn():",
        "for fresh in self._fresh[BE].in_turn()[::-1]:",
        "unit/router/test_accounts.py",
    ),
    fault(
        "router/policies/unified.py",
        "in_time = in_fair_order(in_time)",
        "in_time = list(in_time)",
        "unit/router/test_accounts.py",
    ),
    fault(
        "router/accounts.py",
        "account.served = max(account.served, min(others, default=parent.last_served))",
        "account.served = max(account.served, 0.0)",
        "unit/router/test_accounts.py",
    ),
    fault(
        "router/queue.py",
        "if other.prefix_salt == request.prefix_salt:",
        "if other is not request:",
        "unit/router/test_queue.py",
        "unit/router/test_prefix_tree.py",
        "sim/test_core_prefixes.py",
    ),
    fault(
        "router/kv/slots.py",
        "place = (free & -free if end.is_low else free).bit_length() - 1",
        "place = (free & -free).bit_length() - 1",
        "unit/router/test_block_slots.py",
    ),
    fault(
        "router/kv/slots.py",
        "num_blocks = -(-max(count - left, 0) // self.block_size)",
        "num_blocks = max(count - left, 0) // self.block_size",
        "unit/router/test_block_slots.py",
    ),
    fault(
        "router/kv/prefix_tree.py",
        "was_real_time=node.was_real_time,",
        "was_real_time=False,",
        "unit/router/test_prefix_tree.py",
    ),
    fault(
        "router/kv/prefix_tree.py",
        "wanted = min(missing, self.num_evictable_rt - num_protected_rt)",
        "wanted = missing",
        "unit/router/test_prefix_tree.py",
        "unit/router/test_retained_prefixes.py",
        "sim/test_kv_machine.py",
    ),
    fault(
        "router/kv/host.py",
        "end = min(request.num_held_tokens, request.num_computed_tokens)  # confirmed",
        "end = request.num_held_tokens",
        "unit/router/test_kv_store.py",
        "sim/test_kv_machine.py",
        "sim/test_core_properties.py",
    ),
    fault(
        "router/kv/kv_map.py",
        "return _Use(rt, be & ~rt, saved & ~shared)",
        "return _Use(rt, be & ~rt, saved)",
        "unit/router/test_kv_map.py",
        "sim/test_core_prefixes.py",
    ),
    fault(
        "router/step_cost.py",
        "missed = seconds > limit_s",
        "missed = seconds > 2 * limit_s",
        "sim/test_step_guard.py",
        "unit/cost/test_step_cost.py",
        "unit/router/test_pipeline.py",
    ),
    fault(
        "router/step_cost.py",
        "if most > 1 and self.seconds(shape.plus(start, most)) <= limit_s:",
        "if most > 1 and self.seconds(shape.plus(start, most)) <= 1.05 * limit_s:",
        "unit/cost/test_step_cost.py",
    ),
    fault(
        "router/admission/risk.py",
        "rank = len(peaks) - 1 - int(",
        "rank = len(peaks) // 2 - int(",
        "unit/router/test_admission.py",
        "unit/router/test_classwise_admission.py",
    ),
    fault(
        "router/admission/classwise.py",
        "if self._be_room - self._num_brought < num_brought:",
        "if self._be_room < num_brought:",
        "unit/router/test_classwise_admission.py",
        "sim/test_kv_machine.py",
    ),
    fault(
        "router/future_memory.py",
        "self._needed = self._ends * np.arange(1, num_requests + 1, dtype=dtype)",
        "self._needed = self._ends * np.arange(0, num_requests, dtype=dtype)",
        "unit/router/test_future_memory.py",
    ),
]
FRONTEND = [
    fault(
        "frontend/news.py",
        "self.finish_reason if is_last else None,",
        "self.finish_reason,",
        "unit/frontend/test_router_client.py",
        "unit/frontend/test_long_answers.py",
    ),
    fault(
        "frontend/middleware.py",
        "if access is Access.OPERATOR and not key.is_admin:",
        "if access is Access.OPERATOR and not key.name:",
        "unit/frontend/test_access.py",
    ),
    fault(
        "frontend/middleware.py",
        "is_foreign = bool(origins)",
        "is_foreign = False",
        "unit/frontend/test_access.py",
    ),
    fault(
        "frontend/middleware.py",
        "if num_bytes > most:",
        "if num_bytes > most + 1:",
        "unit/frontend/test_frontend_fields.py",
    ),
    fault(
        "frontend/json_body.py",
        "if len(value) != len(pairs):",
        "if len(value) > len(pairs):",
        "unit/frontend/test_frontend_fields.py",
    ),
    fault(
        "frontend/json_body.py",
        "self._size -= size",
        "self._size -= 0",
        "unit/frontend/test_backlog.py",
    ),
    fault(
        "frontend/openai/call_text.py",
        "self._content(self._raw.getvalue() + scanner.raw[:-1])",
        "self._content(scanner.raw[:-1])",
        "unit/frontend/test_call_formats.py",
    ),
    fault(
        "frontend/openai/call_text.py",
        "for mark in marks if text.startswith(mark)), key=len,",
        "for mark in marks if text.startswith(mark)), key=lambda mark: -len(mark),",
        "unit/frontend/test_call_formats.py",
    ),
    fault(
        "frontend/openai/thinking.py",
        "lengths = range(min(len(text), len(mark) - 1), 0, -1)",
        "lengths = range(min(len(text), len(mark) - 2), 0, -1)",
        "unit/frontend/test_tools.py",
    ),
    fault(
        "frontend/columns.py",
        "top = slice(start * self._num_top, stop * self._num_top)",
        "top = slice(0, (stop - start) * self._num_top)",
        "unit/frontend/test_long_answers.py",
        "unit/frontend/test_answer_logprobs.py",
    ),
    fault(
        "structured.py",
        'says = "properties" in schema and not any(key in schema for key in _DECIDING)',
        'says = "properties" in schema',
        "unit/structured/test_grammar_vocabulary.py",
    ),
    fault(
        "tokenization/detokenizer.py",
        "range(min(self._longest - 1, len(text)), 0, -1)",
        "range(min(self._longest - 2, len(text)), 0, -1)",
        "unit/tokenization/test_detokenizer.py",
    ),
    fault(
        "tokenization/detokenizer.py",
        "self._num_to_strip = 0 if continues else table.num_stripped",
        "self._num_to_strip = table.num_stripped",
        "unit/tokenization/test_detokenizer.py",
    ),
    fault(
        "tokenization/template_sandbox.py",
        "if len(str(separator)) * len(items) > MAX_OUTPUT_CHARS:",
        "if len(str(separator)) > MAX_OUTPUT_CHARS:",
        "unit/tokenization/test_chat_template.py",
    ),
]
PROCESSES = [
    fault(
        "messages/router_worker.py",
        "(token_ids < NO_TOKEN).any() or (is_token[:, 1:] & ~is_token[:, :-1]).any()",
        "(token_ids < NO_TOKEN).any()",
        "unit/messages/test_messages.py",
    ),
    fault(
        "channels.py",
        "if len(frame) > self.max_recv_bytes:",
        "if len(frame) > 2 * self.max_recv_bytes:",
        "integration/test_channels.py",
        "unit/messages/test_messages.py",
    ),
    fault(
        "channels.py",
        'address.removeprefix("ipc://"), 0o600)',
        'address.removeprefix("ipc://"), 0o666)',
        "integration/test_channels.py",
    ),
    fault(
        "supervisor/metrics.py",
        "if family is not None and family.kind is not Kind.GAUGE:",
        "if family is not None:",
        "unit/metrics/test_metrics.py",
    ),
    fault(
        "metrics/requests.py",
        "self._max_gap_s = max(self._max_gap_s, gap_s)",
        "self._max_gap_s = gap_s",
        "unit/metrics/test_metrics.py",
        "unit/frontend/test_frontend_metrics.py",
        "unit/frontend/test_terms.py",
    ),
    fault(
        "supervisor/fleet.py",
        "if incarnation == self._incarnation:",
        "if incarnation <= self._incarnation:",
        "unit/supervisor/test_fleet.py",
    ),
    fault(
        "supervisor/fleet.py",
        "if child.spec.role is Role.WORKER:\n            child.due_s",
        "if child.spec.role is Role.ROUTER:\n            child.due_s",
        "unit/supervisor/test_fleet.py",
    ),
    fault(
        "config/file.py",
        "if kind is float and type(value) is int:",
        "if kind is float and type(value) is bool:",
        "unit/config/test_config_file.py",
    ),
    fault(
        "http_access.py",
        "elif len(secret) < MIN_KEY_CHARS or",
        "elif",
        "unit/test_api_keys.py",
    ),
    fault(
        "logs.py",
        "self._num_bytes + len(data) > MAX_QUEUED_BYTES:",
        "self._num_bytes + len(data) > 2 * MAX_QUEUED_BYTES:",
        "unit/test_logs.py",
    ),
    fault(
        "decisions/replaying.py",
        "if text != msgspec.json.encode(recorded):",
        "if text is None:",
        "sim/test_replay.py",
    ),
    fault(
        "chat.py",
        "forgotten = len(self.history[-2:])\n                del self.history[-2:]",
        "forgotten = len(self.history[-2:])\n                del self.history[-1:]",
        "unit/chat/test_chat.py",
    ),
    fault(
        "loadtest/statistics.py",
        "* 1e3 / (self.num_tokens - 1)",
        "* 1e3 / self.num_tokens",
        "unit/loadtest/test_load_statistics.py",
    ),
    fault(
        "loadtest/client.py",
        "budget_s = record.intended_s + self._server.timeout_s - record.sent_s",
        "budget_s = self._server.timeout_s",
        "unit/loadtest/test_load_client.py",
    ),
    fault(
        "loadtest/workload.py",
        "Segment(block_id, left if is_last else min(left, block_tokens))",
        "Segment(block_id, min(left, block_tokens))",
        "unit/loadtest/test_load_workloads.py",
    ),
    fault(
        "sim/report.py",
        "tpot_s = (times[-1] - times[0]) / len(gaps) if times else 0.0",
        "tpot_s = (times[-1] - times[0]) / len(times) if times else 0.0",
        "sim/test_hybrid.py",
    ),
    fault(
        "cost/model.py",
        "return num_tokens * start + num_tokens * (num_tokens - 1) // 2",
        "return num_tokens * start + num_tokens * num_tokens // 2",
        "unit/cost/test_step_profile.py",
        "unit/cost/test_step_cost.py",
    ),
]
WORKER = [
    fault(
        "worker/sampling/sampler.py",
        "torch.where(values > 0, values / factor, values * factor)",
        "values / factor",
        "unit/worker/test_sampler.py",
    ),
    fault(
        "worker/sampling/sampler.py",
        "in_top_p = (cumulative - values < options.top_p * total)",
        "in_top_p = (cumulative < options.top_p * total)",
        "unit/worker/test_sampler.py",
    ),
    fault(
        "worker/step_loop.py",
        "link = None if len(self._running) > 1 else self._link",
        "link = self._link",
        "unit/worker/test_step_loop.py",
    ),
    fault(
        "worker/host_pool.py",
        "for others in (plan.loads, plan.ahead_saves):",
        "for others in (plan.loads,):",
        "unit/worker/test_host_pool.py",
    ),
    fault(
        "worker/memory.py",
        "if budget * num_ranks > free_bytes:",
        "if budget > free_bytes:",
        "unit/worker/test_worker_parts.py",
        "unit/worker/test_device_memory.py",
    ),
    fault(
        "worker/tables.py",
        "rows[wants] * self._width + ends[wants],",
        "rows[wants] * self._width + ends[wants] - 1,",
        "unit/worker/test_worker_parts.py",
        "integration/test_engine.py",
    ),
    fault(
        "kernels/reference.py",
        "hidden |= k_positions <= q_positions - sliding_window",
        "hidden |= k_positions < q_positions - sliding_window",
        "kernels/test_kernel_grid.py",
        "models/test_parity.py",
    ),
    fault(
        "kernels/reference.py",
        "scores = mod.soft_cap * torch.tanh(scores / mod.soft_cap)",
        "scores = torch.tanh(scores / mod.soft_cap)",
        "kernels/test_kernel_grid.py",
        "models/test_parity.py",
    ),
    fault(
        "models/layers/attention.py",
        '(name.rpartition(".")[0], rows.start) in self._rotated',
        'name.rpartition(".")[0] in {module for module, _ in self._rotated}',
        "models/test_parity.py",
    ),
    fault(
        "kernels/cpu/default.py",
        "scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()",
        "scale = wide.square().mean(dim=-1, keepdim=True).rsqrt_()",
        "kernels/test_kernel_grid.py",
        "models/test_parity.py",
    ),
    fault(
        "kernels/cpu/plan.py",
        "np.maximum(0, context_lens - q_lens + 1 - sliding_window)",
        "np.maximum(0, context_lens - sliding_window)",
        "kernels/test_kernel_grid.py",
        "models/test_parity.py",
    ),
    fault(
        "kernels/triton/elementwise.py",
        "mask = (heads < NUM_KV_HEADS) & (columns < 2 * HALF + REST)",
        "mask = (heads < NUM_KV_HEADS) & (columns < 2 * HALF)",
        "kernels/test_elementwise_kernels.py",
    ),
    fault(
        "kernels/triton/prefill.py",
        "begin = tl.maximum(0, first_position - window + 1)",
        "begin = tl.maximum(0, first_position - window + 65)",
        "kernels/test_kernel_grid.py",
        "kernels/test_triton_attention.py",
    ),
    fault(
        "kernels/triton/sampling_adjust.py",
        "in_output = (counts & (_IN_PROMPT - 1)).to(tl.float32)",
        "in_output = counts.to(tl.float32)",
        "kernels/test_triton_sampling.py",
    ),
    fault(
        "models/layers/attention.py",
        "blended = (1 - smooth) * scaled / rope.factor + smooth * scaled",
        "blended = (1 - smooth) * scaled + smooth * scaled",
        "models/test_loading.py",
    ),
    fault(
        "models/decoder.py",
        "return embedding, embedding if torch.equal(embedding.tensor, head.tensor) else head",
        "return embedding, embedding",
        "models/test_loading.py",
    ),
    fault(
        "models/layers/linear.py",
        "self.first_id = tp.rank * num_rows",
        "self.first_id = min(tp.rank, 1) * num_rows",
        "models/test_tensor_parallel.py",
    ),
]
BATCHES = [
    fault(
        "batches/sqlite.py",
        'self._connection.execute("PRAGMA synchronous=FULL")',
        'self._connection.execute("PRAGMA synchronous=NORMAL")',
        "unit/batches/test_power_cuts.py",
    ),
    fault(
        "batches/jobs.py",
        "WHERE lease_until_s < ? AND name != ?)",
        "WHERE lease_until_s < ? AND name = ?)",
        "unit/batches/test_jobs.py",
    ),
    fault(
        "batches/jobs.py",
        "                if num_left == 0:\n                    over",
        "                if num_left == 1:\n                    over",
        "unit/batches/test_jobs.py",
    ),
    fault(
        "batches/jobs.py",
        'if self._db.value("SELECT epoch FROM owners WHERE name = ?", owner) != epoch:',
        'if self._db.value("SELECT epoch FROM owners WHERE name = ?", owner) is None:',
        "unit/batches/test_jobs.py",
    ),
    fault(
        "batches/jobs.py",
        "num_late += not changed",
        "num_late += changed > 1",
        "unit/batches/test_jobs.py",
    ),
    fault(
        "batches/files.py",
        "min(end - begins, CHUNK_BYTES)",
        "min(end - begins, CHUNK_BYTES - 1)",
        "unit/batches/test_lines.py",
    ),
    fault(
        "batches/files.py",
        "is_last = (cursor + 1) * CHUNK_BYTES >= file.num_bytes",
        "is_last = (cursor + 1) * CHUNK_BYTES > file.num_bytes",
        "unit/batches/test_jobs.py",
    ),
    fault(
        "batches/runner.py",
        "is_worn_out = line.losses + answer.is_lost >= MAX_LOSSES",
        "is_worn_out = line.losses >= MAX_LOSSES",
        "unit/batches/test_batch_routes.py",
    ),
    fault(
        "batches/runner.py",
        "            if (batch, number) not in held.lines:",
        "            if batch not in held.batches:",
        "unit/batches/test_consistency.py",
    ),
    fault(
        "batches/runner.py",
        "        self._is_lease_over = True\n",
        "        self._is_lease_over = False\n",
        "unit/batches/test_postgres_store.py",
    ),
    fault(
        "batches/postgres.py",
        """skip_locked: ClassVar[str] = " FOR UPDATE SKIP LOCKED\"""",
        """skip_locked: ClassVar[str] = " FOR UPDATE\"""",
        "unit/batches/test_postgres_store.py",
    ),
    fault(
        "batches/postgres.py",
        """lock = "pg_advisory_xact_lock_shared" if is_shared""",
        """lock = "pg_advisory_xact_lock_shared" if True""",
        "unit/batches/test_postgres_store.py",
    ),
    fault(
        "batches/runner.py",
        "return left_s * min(1.0, num_in_flight / line.num_left)",
        "return left_s",
        "unit/batches/test_runner.py",
    ),
]

CORE = [
    fault(
        "kernels/cpu/csrc/linear_bf16.cpp",
        "const __m512i even = widened_bytes(fours, 16 * pair);",
        "const __m512i even = widened_bytes(fours, 8 * pair);",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/linear_bf16.cpp",
        "vector_panel<1, true>(task, rows, row, number, panel_of(number), none);",
        "vector_panel<1, true>(task, rows, row, number, panel_of(number / 2), none);",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/linear_bf16.cpp",
        "for (int c = 1; c < CHAINS; c++)",
        "for (int c = 2; c < CHAINS; c++)",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/linear_bf16.cpp",
        "CASE(5) CASE(6) CASE(7)",
        "CASE(5) CASE(7)",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/linear_int8.cpp",
        "x[r] = rows.group((first_row + r) / GROUP)",
        "x[r] = rows.group(first_row / GROUP)",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/linear_int8.cpp",
        "_mm512_slli_epi32(weights, 7)",
        "_mm512_slli_epi32(weights, 6)",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/linear_groups.cpp",
        "rows.sums[(first_row + r) * rows.num_groups + group]",
        "rows.sums[r * rows.num_groups + group]",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/tiles.h",
        "      chunk = next;",
        "      chunk = cursor.take();",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/experts.cpp",
        "const float share = shares[pairs[first + i]];",
        "const float share = shares[first + i];",
        "kernels/test_expert_kernels.py",
    ),
    fault(
        "kernels/cpu/csrc/experts.cpp",
        "total += shares[i] = scores[chosen[i]];",
        "total += shares[i] = ranks[chosen[i]];",
        "models/test_feed_forward.py",
    ),
    fault(
        "kernels/cpu/csrc/experts.cpp",
        "for (int64_t k = 0; !is_taken[group] && k < size; k++)",
        "for (int64_t k = 0; !is_taken[group] && k < size - 1; k++)",
        "models/test_feed_forward.py",
    ),
    fault(
        "kernels/cpu/csrc/experts.cpp",
        "x + pairs[first + i] / num_chosen * x_stride",
        "x + pairs[first + i] / num_chosen * num_inputs",
        "kernels/test_expert_kernels.py",
    ),
    fault(
        "kernels/cpu/csrc/vectors_attention.h",
        "smaller(num_keys, static_cast<int64_t>(tile.last_key[lane]) + 1 - first_key)",
        "smaller(num_keys, static_cast<int64_t>(tile.last_key[lane]) - first_key)",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/vectors_attention.h",
        "load(weights + (t * KEY_BLOCK + key) * LANES + v * W)",
        "load(weights + key * LANES + v * W)",
        "kernels/test_native_core.py",
    ),
    fault(
        "kernels/cpu/csrc/program.cpp",
        "if (chosen[i] < 0 || chosen[i] >= num_rows) return 0;",
        "if (chosen[i] < 0 || chosen[i] > num_rows) return 0;",
        "models/test_recorded_passes.py",
    ),
    fault(
        "kernels/cpu/program.py",
        "free = [a for a in arenas if a.count == count and a.last_use < uses[0]]",
        "free = [a for a in arenas if a.count == count and a.last_use <= uses[0]]",
        "models/test_recorded_passes.py",
    ),
    fault(
        "kernels/cpu/program.py",
        "if attempts[0] != attempts[1]:",
        "if len(attempts[0]) != len(attempts[1]):",
        "models/test_recorded_passes.py",
    ),
    fault(
        "kernels/cpu/program.py",
        "if result.data_ptr() != part.data_ptr():",
        "if result.data_ptr() == part.data_ptr():",
        "models/test_recorded_passes.py",
    ),
    fault(
        "kernels/cpu/program.py",
        'kwargs.keys() - {"memory_format"}',
        'kwargs.keys() - {"memory_format", "alpha"}',
        "models/test_recorded_passes.py",
    ),
    fault(
        "kernels/cpu/csrc/vectors_elements.h",
        "for (int64_t i = count; i < W; i++) apart[i] = 0.0f;",
        "",
        "kernels/test_native_elements.py",
    ),
    fault(
        "models/passes.py",
        "if kv is not self._kv:",
        "if self._kv is None:",
        "models/test_recorded_passes.py",
    ),
]
"""Of the native core, which is built with each."""

WEIGHTS = [
    fault(
        "kernels/triton/merge.py",
        "scores -= (slopes * _LOG2_E)[:, None] * distances",
        "scores -= slopes[:, None] * distances",
        "kernels/test_kernel_grid.py",
    ),
    fault(
        "kernels/triton/merge.py",
        "scores = (1.0 - 2.0 / (power + 1.0)) * (soft_cap * _LOG2_E)",
        "scores = (1.0 - 2.0 / (power + 1.0)) * soft_cap",
        "kernels/test_kernel_grid.py",
    ),
    fault(
        "kernels/triton/merge.py",
        "total += tl.exp2(tl.load(sinks_ptr + head) * _LOG2_E - largest)",
        "total += tl.exp2(tl.load(sinks_ptr + head) - largest)",
        "kernels/test_kernel_grid.py",
    ),
    fault(
        "kernels/triton/prefill.py",
        "if HAS_SINKS and not IS_CUT:",
        "if HAS_SINKS:",
        "kernels/test_kernel_grid.py",
    ),
    fault(
        "kernels/triton/decode.py",
        "part < 0, sinks_of(",
        "part < 1, sinks_of(",
        "kernels/test_kernel_grid.py",
    ),
    fault(
        "models/alibi.py",
        "_of_power(2 * power)[::2]",
        "_of_power(2 * power)[1::2]",
        "models/test_parity.py",
    ),
    fault(
        "models/layers/attention.py",
        "own = config.alibi_slopes[heads.start : heads.start + heads.size]",
        "own = config.alibi_slopes[: heads.size]",
        "models/test_tensor_parallel.py",
    ),
    fault(
        "models/stored_weights.py",
        "powers = stored.int() - MXFP4_BIAS - 1",
        "powers = stored.int() - MXFP4_BIAS",
        "models/test_mxfp4.py",
    ),
    fault(
        "models/gpt_oss.py",
        "torch.stack([blocks & 0xF, blocks >> 4], dim=-1)",
        "torch.stack([blocks >> 4, blocks & 0xF], dim=-1)",
        "models/test_mxfp4.py",
    ),
    fault(
        "models/stored_weights.py",
        "first_input=columns.start % MXFP4_GROUP,",
        "first_input=0,",
        "models/test_mxfp4.py",
    ),
    fault(
        "models/weight_format.py",
        'zero_offset=1 if written == "gptq" else 0,',
        "zero_offset=1,",
        "models/test_quantised_files.py",
    ),
    fault(
        "models/stored_weights.py",
        "AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)",
        "AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        "models/test_quantised_files.py",
    ),
    fault(
        "models/stored_weights.py",
        "if torch.equal(groups, in_turn):",
        "if len(groups) == len(in_turn):",
        "models/test_quantised_files.py",
    ),
    fault(
        "models/stored_weights.py",
        "and (part.group_size - start) % size == 0",
        "and part.group_size > start",
        "models/test_quantised_files.py",
    ),
    fault(
        "models/stored_weights.py",
        "part.factors[:, (starts + part.first_input) // (part.group_size or num_inputs)]",
        "part.factors[:, starts // (part.group_size or num_inputs)]",
        "kernels/test_triton_quantized.py",
    ),
    fault(
        "models/deepseek.py",
        "first=latent.plain_dim,",
        "first=0,",
        "models/test_parity.py",
    ),
    fault(
        "models/latent_config.py",
        "scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2",
        "scale *= 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0",
        "models/test_parity.py",
    ),
    fault(
        "kernels/triton/decode.py",
        "q_places, stacked < GROUP, HEAD_DIM, TURNED_DIM",
        "q_places, stacked < GROUP, 0, TURNED_DIM",
        "models/test_latent.py",
    ),
    fault(
        "kernels/triton/configs.py",
        "for size in range(1, LATENT_HEADS + 1) if num_heads % size == 0",
        "for size in range(1, LATENT_HEADS + 1) if num_heads >= size",
        "kernels/test_triton_attention.py",
    ),
    fault(
        "kernels/triton/quantized.py",
        "((wide & 0x80) << 8) | ((wide & 0x7F) << 7)",
        "((wide & 0x80) << 8) | ((wide & 0x78) << 7)",
        "kernels/test_triton_quantized.py",
    ),
    fault(
        "kernels/triton/quantized.py",
        "tl.minimum((first + BLOCK_K) // GROUP, last)",
        "tl.minimum(first // GROUP, last)",
        "kernels/test_triton_quantized.py",
    ),
    fault(
        "kernels/triton/quantized.py",
        "own += start // GROUP * factors_stride",
        "own += start // BLOCK_K * factors_stride",
        "kernels/test_triton_quantized.py",
    ),
    fault(
        "models/layers/fp8.py",
        "product = sums.mul_(factors).mul_(self._factors)",
        "product = sums.mul_(factors)",
        "models/test_quantization.py",
    ),
]
"""Of families, formats of weights and what GPUs make of them."""

FAULTS = ROUTER + FRONTEND + PROCESSES + WORKER + BATCHES + CORE + WEIGHTS


class Result(NamedTuple):
    """What became of a fault."""

    fault: Fault
    exit_code: int
    seconds: float
    last_line: str


def copy_tree(source: Path, target: Path) -> None:
    """Copy what tests need, the native core as it is built included."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=ignored)
    for name in FILES:
        if (source / name).exists():
            shutil.copy2(source / name, target / name)


def run_tests(tree: Path, tests: list[str], *, with_long: bool) -> tuple[int, str]:
    """Run test files of a tree; returns pytest's exit code, and what failed or the last line.

    In a copy of this process, which has imported what takes long and nothing of lightserve.
    """
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=300", *tests]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was imported before
    if with_long:
        arguments += ["-m", "not soak"]
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _be_pytest(tree, arguments, output.fileno())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or [""]
    failed = (line for line in lines if line.startswith(("FAILED", "ERROR")))
    return os.waitstatus_to_exitcode(status), next(failed, lines[-1])


def _be_pytest(tree: Path, arguments: list[str], output_fd: int) -> NoReturn:
    code = -1
    try:
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        # What did not change is compiled once.
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry) != ROOT)]
        sys.modules.pop("tools", None)
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def write(path: Path, text: str) -> None:
    """Write a file whose bytecode is stale from now on."""
    path.write_text(text)
    time_s = next(TIMES_S)
    os.utime(path, (time_s, time_s))


def build_core(tree: Path) -> bool:
    """Build a tree's native core; returns whether it is what the sources say now."""
    build = "import setup; setup.build_core(setup.CPU)"
    check = "from lightserve.kernels.cpu.core import load_core; load_core()"
    command = [sys.executable, "-c", f"{build}; {check}"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, check=False).returncode == 0


def try_fault(tree: Path, planted: Fault, *, with_long: bool) -> Result:
    """Plant a fault, run its tests, and take it out again."""
    path = tree / "lightserve" / planted.path
    text = path.read_text()
    if text.count(planted.right) != 1:
        return Result(planted, -1, 0.0, f"{text.count(planted.right)} places to plant it in")
    start_s = time.monotonic()
    library = tree / "lightserve/kernels/cpu/libcore.so"
    built = library.read_bytes() if library.exists() else None
    write(path, text.replace(planted.right, planted.wrong))
    try:
        if path.suffix in (".cpp", ".h") and not build_core(tree):
            return Result(planted, -1, 0.0, "the native core cannot be built with it")
        tests = [f"tests/{name}" for name in planted.tests]
        code, line = run_tests(tree, tests, with_long=with_long)
    finally:
        write(path, text)
        if built is not None:
            library.write_bytes(built)
    return Result(planted, code, time.monotonic() - start_s, line)


def main() -> int:
    """Try all faults; returns how many were not found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="faults in paths that hold this")
    parser.add_argument("--below", default="", help="only tests below this folder of tests/")
    parser.add_argument("--at-once", action="store_true", help="no run without a fault first")
    parser.add_argument("--list", action="store_true", help="say what there is, and stop")
    parser.add_argument("--tests", choices=("quick", "all"), default="quick")
    parser.add_argument("--tree", type=Path, default=ROOT, help="which tree is copied")
    options = parser.parse_args()
    chosen = [
        each._replace(tests=tests)
        for each in FAULTS
        if options.only in each.path
        and (tests := tuple(name for name in each.tests if name.startswith(options.below)))
    ]
    if options.list:
        for each in chosen:
            print(f"{each.path}: {each.right!r} -> {each.wrong!r}")
        return 0
    for name in PRELOADED:
        importlib.import_module(name)
    results = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder)
        copy_tree(options.tree, tree)
        if not options.at_once:
            whole = sorted({f"tests/{name}" for each in chosen for name in each.tests})
            code, line = run_tests(tree, whole, with_long=options.tests == "all")
            print(f"without a fault: {line}", flush=True)
            if code != MISSED:
                return 1
        for each in chosen:
            result = try_fault(tree, each, with_long=options.tests == "all")
            word = {FOUND: "found", MISSED: "MISSED"}.get(result.exit_code, "ERROR")
            print(
                f"{word:6} {result.seconds:6.1f} s  {each.path}: {each.wrong[:60]!r}"
                f"  {result.last_line}",
                flush=True,
            )
            results.append(result)
    num_found = sum(result.exit_code == FOUND for result in results)
    print(f"{num_found} of {len(results)} found")
    return len(results) - num_found


if __name__ == "__main__":
    sys.exit(main())

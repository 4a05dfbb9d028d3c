"""What a run is made of, as one table that can be written in TOML, and how it is read and checked.

    mode = "psd"                                  # ar, sd or psd; pearl or pearl-minedraft (minedraft.sim.pearl)
    seed = 0
    [scheduler]                                   # the fields of SchedulerConfig
    max_batch_size = 16
    [policies]                                    # slot = name, package.module:Class, or a table with options
    draft_length = { name = "fixed", k = 2 }
    [workload]
    num_requests = 200
    arrivals = { kind = "poisson", rate = 4.0 }
    prompt_lens = { kind = "lognormal", mean = 300, p50 = 200 }
    output_lens = 256
    [cost]
    kind = "paper"
    drafter = "qwen3-1.7b"
    [acceptance]
    synthetic_acceptance_rates = [0.7, 0.5, 0.3]
    [devices]
    num_target_devices = 4
    [drafting]
    method = "draft_model"                        # eagle, eagle3, mtp, ngram
    [link]
    preset = "pcie4-x16"                          # left out, what travels between target and drafter takes no time

Everything has a default; together the defaults are the setting of the paper's stage times (arXiv 2603.18016, Fig. 25:
Qwen3-32B on four devices, Qwen3-1.7B on a fifth, 16 requests per step, k = 3, all requests there at once). All times
are seconds.

Law of this file: nothing but the core and pydantic is imported until a part of the simulated world is asked for.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from minedraft.config_acceptance import Acceptance, ConstantAcceptanceTable
from minedraft.config_base import Table, building
from minedraft.config_cost import Cost, GpuCostTable, PaperCostTable, StepCostTable
from minedraft.config_drafting import DraftingTable, Link, check_place, without_drafter
from minedraft.config_messages import ConfigError, FieldError, explain
from minedraft.config_tables import DevicesTable, FaultsTable, PoliciesTable, SchedulerTable, SloTable
from minedraft.config_tree import NOT_TOML, Override, merged, origin_of, put
from minedraft.config_workload import SyntheticWorkloadTable, Workload
from minedraft.policy import DEFAULT_NAMES, Policies, load_policies, parse_spec
from minedraft.scheduler_config import SchedulerConfig

__all__ = ["ConfigError", "RunConfig", "build_policies", "load_config", "named_variants", "parse_config", "read_tree"]

PEARL_MODES: Final = ("pearl", "pearl-minedraft")
SET_BY_GPUS: Final = {
    "scheduler": ("num_target_blocks", "num_draft_blocks"),
    "devices": ("num_target_devices", "num_draft_devices"),
}

# --- the run


class RunConfig(Table):
    """A run, whole and checked. Make it with `load_config` or `parse_config`."""

    mode: Literal["ar", "sd", "psd", "pearl", "pearl-minedraft"] = "psd"
    seed: int = Field(default=0, ge=0)
    scheduler: SchedulerTable = SchedulerTable()
    policies: PoliciesTable = PoliciesTable()
    workload: Workload = SyntheticWorkloadTable()
    cost: Cost = PaperCostTable()
    acceptance: Acceptance = ConstantAcceptanceTable()
    devices: DevicesTable = DevicesTable()
    drafting: DraftingTable = DraftingTable()
    link: Link = None
    faults: FaultsTable = FaultsTable()
    slo: SloTable | None = None

    @property
    def colocated(self) -> bool:
        """Whether the drafter shares the target's devices."""
        if self.drafting.on_host:
            return False
        return self.mode == "sd" if self.devices.colocated is None else self.devices.colocated

    @property
    def closed_loop(self) -> bool:
        """Whether a fixed number of clients wait for their answers, so that no backlog can grow."""
        return self.workload.max_concurrency is not None

    @property
    def core_mode(self) -> str:
        """The mode of the core, by name: PEARL is sequential decoding in a world of its own."""
        return "sd" if self.mode in PEARL_MODES else self.mode

    @property
    def num_target_devices(self) -> int:
        """Devices of all replicas' targets: as given for one, else what the cost model prices."""
        if isinstance(self.cost, GpuCostTable) and "num_target_devices" not in self.devices.model_fields_set:
            return self.devices.num_replicas * self.cost.num_target_devices
        return self.devices.num_replicas * self.devices.num_target_devices

    @property
    def num_draft_devices(self) -> int:
        """Devices that only the drafter uses."""
        if self.mode == "ar" or self.colocated or self.drafting.on_host:
            return 0
        if isinstance(self.cost, GpuCostTable) and "num_draft_devices" not in self.devices.model_fields_set:
            return self.cost.num_draft_devices
        return self.devices.num_draft_devices

    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler's limits in this mode."""
        values = self.scheduler.arguments()
        wanted = values["num_batches"]
        if self.mode == "psd":
            values["num_batches"] = 2 if wanted is None else wanted
            if values["num_batches"] < 2:
                raise FieldError(
                    "scheduler.num_batches", f'is {wanted}, must be >= 2 in psd mode; use mode = "sd" for one batch'
                )
        else:
            values["num_batches"] = 1
        if "draft_ingests_beside" not in self.scheduler.model_fields_set:
            values["draft_ingests_beside"] = not self.colocated and self.mode not in PEARL_MODES
        if isinstance(self.cost, GpuCostTable):
            values.update(self._pools_of_the_gpus(values["block_size"]))
        if self.mode == "ar":
            values["num_draft_blocks"] = 0
        else:
            values.update(self.drafting.limits(self.cost))
        with building("scheduler"):
            return SchedulerConfig(**values)

    def _pools_of_the_gpus(self, block_size: int) -> dict[str, int]:
        """Sizes of the KV pools by the GPUs' memory, where none are given."""
        colocated = self.mode != "ar" and self.colocated
        cost = without_drafter(self.cost) if self.drafting.on_host else self.cost
        assert isinstance(cost, GpuCostTable)
        num_target, num_draft = cost.kv_blocks(block_size, colocated=colocated)
        if not colocated:
            num_draft //= self.devices.num_replicas  # each replica's share of the one drafter
        sizes = {"num_target_blocks": num_target, "num_draft_blocks": num_draft}
        return {name: size for name, size in sizes.items() if name not in self.scheduler.model_fields_set}

    def policy_specs(self) -> dict[str, dict[str, Any]]:
        """By slot, the name of the policy and its options in one table: what a journal's header needs."""
        defaults: dict[str, str | dict[str, Any]] = {**DEFAULT_NAMES}
        given = {slot: spec for slot, spec in self.policies.arguments().items() if spec is not None}
        specs = {slot: _spec_table(slot, spec) for slot, spec in (defaults | given).items()}
        if specs["mode"]["name"] == "fixed":  # which is psd by itself
            specs["mode"] = {"name": "fixed", "mode": self.core_mode, **specs["mode"]}
        return specs

    def build_policies(self) -> Policies:
        """Fresh policies; make new ones for each run, since a policy may remember."""
        return build_policies(self.policy_specs())

    def build_cost(self) -> Any:
        """The `minedraft.sim.cost.CostModel`."""
        with building("cost"):
            return self.drafting.build_cost(self.cost)

    def build_acceptance(self) -> Any:
        """A fresh `minedraft.sim.acceptance.AcceptanceModel`."""
        with building("acceptance"):
            return self.acceptance.build(self.seed, self.scheduler.num_speculative_tokens)

    def build_workload(self) -> Any:
        """An iterable of `minedraft.sim.workload.SimRequest`."""
        with building("workload"):
            return self.workload.build(self.seed)

    def build_faults(self) -> Any:
        """The `minedraft.sim.faults.Faults`."""
        with building("faults"):
            faults = self.faults.build(self.seed)
        # Without a drafter none can be lost: a setting that several modes share must not end the one that has none.
        if self.drafting.on_host:
            faults = dataclasses.replace(faults, pauses=tuple(p for p in faults.pauses if p.device == "target"))
        return dataclasses.replace(faults, outages=()) if self.mode == "ar" or self.drafting.on_host else faults

    def build_traffic(self) -> Any:
        """The `minedraft.sim.links.Traffic`; None where the drafter has no device of its own, or no link is given."""
        if self.link is None or not self.num_draft_devices:
            return None
        return self.link.build(self.cost, self.drafting.build(self.cost))

    def build_world(self) -> Any:
        """A fresh `minedraft.sim.backend.SimBackend`.

        Raises:
            TraceError: the first line of the trace is bad.
            WorkloadError: the first request is out of range.
        """
        maker = self._world_maker()
        return maker(self.build_workload(), max_concurrency=self.workload.max_concurrency, faults=self.build_faults())

    def build_star(self) -> Any:
        """A fresh `minedraft.sim.star.Star` of `devices.num_replicas` worlds.

        Raises:
            TraceError: the first line of the trace is bad.
            WorkloadError: the first request is out of range.
        """
        from minedraft.sim.star import ROUTERS, make_star

        return make_star(
            self._world_maker(),
            self.build_workload(),
            self.devices.num_replicas,
            ROUTERS[self.devices.router](),
            shares_drafter=self.num_draft_devices > 0,
            max_concurrency=self.workload.max_concurrency,
            faults=self.build_faults(),
        )

    def _world_maker(self) -> Any:
        """Makes worlds that share cost and acceptance model; takes what is left of `SimBackend`'s arguments."""
        from minedraft.sim.backend import SimBackend
        from minedraft.sim.pearl import MineDraftPearlBackend, PearlBackend

        worlds = {"pearl": PearlBackend, "pearl-minedraft": MineDraftPearlBackend}
        return partial(
            worlds.get(self.mode, SimBackend),
            cost=self.build_cost(),
            acceptance=self.build_acceptance(),
            colocated=self.colocated,
            drafts_on_host=self.drafting.on_host,
            traffic=self.build_traffic(),
            num_drafted=self.drafting.build_num_drafted(self.seed),
            round_overhead_s=self.devices.round_overhead_s,
            draft_probs=self.acceptance.draft_probs or not self.build_policies().keeps_all,
        )

    def check(self, *, world: bool = True) -> None:
        """Build every part once, so that what doesn't fit together is found before anything runs.

        Args:
            world: check the simulated world's parts too.

        Raises:
            FieldError: something doesn't fit.
        """
        if self.mode in PEARL_MODES and not world:
            raise FieldError("mode", f"is {self.mode!r}, which only the simulated world has; use ar, sd or psd")
        if self.mode in PEARL_MODES and self.colocated:
            raise FieldError(
                "devices.colocated",
                f"is true, but {self.mode} drafts during verification; remove it: the drafter has its own device then",
            )
        if self.mode in PEARL_MODES and "draft_ingests_beside" in self.scheduler.model_fields_set:
            raise FieldError(
                "scheduler.draft_ingests_beside",
                f"is given, but the drafter of {self.mode} drafts during verification; remove it",
            )
        check_place(self.mode, self.drafting, self.link, self.cost, world=world)
        drafts = self.mode != "ar" and not self.drafting.on_host
        if world and drafts and isinstance(self.cost, StepCostTable) and self.cost.draft is None:
            raise FieldError("cost.draft", 'is missing; add [cost.draft], or set mode = "ar"')
        scheduler = self.scheduler_config()
        if (
            self.mode != "ar"
            and self.policies.mode is None
            and scheduler.draft_keeps_kv
            and not scheduler.num_draft_blocks
        ):
            raise FieldError(
                "scheduler.num_draft_blocks", f'is 0, but mode {self.mode} drafts; give it blocks, or set mode = "ar"'
            )
        self._check_policies(scheduler)
        if not world:
            return
        self._check_device_counts()
        self.build_cost()
        self.build_traffic()
        self.drafting.build_num_drafted(self.seed)
        self.build_acceptance()
        self.build_workload()
        self.build_faults()
        self._check_requests_fit(scheduler)

    def _check_policies(self, scheduler: SchedulerConfig) -> None:
        """Refuse policies that can't be made, or select where there is nothing to choose: as good as `all`."""
        policies = self.build_policies()
        if self.mode != "ar" and scheduler.draft_capacity is None and policies.needs_capacity:
            raise FieldError(
                "scheduler.draft_capacity",
                f"is missing, without which selection {self.policy_specs()['selection']['name']!r} keeps every draft; "
                'give it fewer than are drafted in a round, or set policies.selection = "all"',
            )

    def _check_device_counts(self) -> None:
        """Refuse a count of devices that isn't what the cost model prices: figures per device would be wrong."""
        if not isinstance(self.cost, GpuCostTable):
            return
        for group, num_priced in (("target", self.cost.num_target_devices), ("draft", self.cost.num_draft_devices)):
            name = f"num_{group}_devices"
            given = getattr(self.devices, name)
            if name in self.devices.model_fields_set and num_priced and given != num_priced:
                raise FieldError(
                    f"devices.{name}",
                    f"is {given}, but cost.{group}.tp is {num_priced}, which is what the cost model prices; "
                    f"remove {name}, or set cost.{group}.tp = {given}",
                )

    def _check_requests_fit(self, scheduler: SchedulerConfig) -> None:
        longest = self.workload.longest_request
        if longest is None:
            return
        limit, tokens = "num_target_blocks", scheduler.model_len
        least = -(-longest // scheduler.block_size)
        if longest <= tokens:
            if not scheduler.num_draft_blocks:
                return
            limit, tokens = "num_draft_blocks", scheduler.num_draft_blocks * scheduler.block_size
            longest = min(longest, scheduler.draft_len)
            least = -(-longest // scheduler.block_size)
        elif self.scheduler.max_model_len is not None:
            limit, least = "max_model_len", longest
        if longest > tokens:
            raise FieldError(
                f"scheduler.{limit}",
                f"is {getattr(scheduler, limit)}, which holds {tokens} tokens, but one request of the workload needs "
                f"{longest} (prompt_lens + output_lens): make it >= {least}, or shorten the requests",
            )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; `parse_config` takes it back."""
        tree = self.model_dump(mode="json")
        if isinstance(self.cost, GpuCostTable):  # what follows from the GPUs must not come back as given
            for section, names in SET_BY_GPUS.items():
                given = getattr(self, section).model_fields_set
                tree[section] = {key: item for key, item in tree[section].items() if key in given or key not in names}
        return tree


def _spec_table(slot: str, spec: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(spec, str):
        try:
            name, options = parse_spec(spec)
        except ValueError as error:
            raise FieldError(f"policies.{slot}", str(error)) from error
        return {"name": name, **options}
    if not isinstance(spec.get("name"), str):
        raise FieldError(f"policies.{slot}", f'has no name; write {slot} = {{ name = "{DEFAULT_NAMES[slot]}", ... }}')
    return spec


def build_policies(specs: Mapping[str, Mapping[str, Any]]) -> Policies:
    """Policies from tables `{"name": ..., option: ...}` by slot; a slot that is left out gets the default.

    Raises:
        FieldError: a policy can't be made.
    """
    names = {slot: spec["name"] for slot, spec in specs.items()}
    options = {slot: {key: spec[key] for key in spec if key != "name"} for slot, spec in specs.items()}
    for slot in names:
        try:  # one by one, so that the message can say which
            load_policies({slot: names[slot]}, {slot: options[slot]})
        except ValueError as error:
            raise FieldError(f"policies.{slot}", str(error)) from error
    return load_policies(names, options)


# --- reading


def parse_config(
    tree: Mapping[str, Any],
    *,
    source: str = "configuration",
    overrides: Sequence[Override] = (),
    world: bool = True,
) -> RunConfig:
    """Make a run from nested dictionaries, as TOML gives them.

    Args:
        tree: the tables; `variants`, which belong to `minedraft compare`, are left alone.
        source: what to call it in messages.
        overrides: set on top of it.
        world: check the simulated world's parts too.

    Raises:
        ConfigError: it can't be used.
    """
    tree = {key: value for key, value in tree.items() if key != "variants"}
    try:
        for override in overrides:
            tree = put(tree, override.key, override.value)
        config = RunConfig.model_validate(tree)
        config.check(world=world)
    except ValidationError as error:
        fault = explain(error.errors(include_url=False), RunConfig, tree)
    except FieldError as error:
        fault = error
    else:
        return config
    raise ConfigError(f"{origin_of(fault.field, overrides) or source}: {fault}") from None


def read_tree(path: str | Path | None) -> dict[str, Any]:
    """The tables of a TOML file, with paths in it made relative to the file; nothing for None.

    Raises:
        ConfigError: it can't be read, or is not TOML.
    """
    if path is None:
        return {}
    path = Path(path)
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; check the path of the configuration") from error
    except NOT_TOML as error:
        raise ConfigError(f"{path}: not TOML: {error}; correct that line") from error
    return {key: _with_paths_from(path.parent, value) for key, value in tree.items()}


def _with_paths_from(folder: Path, value: Any) -> Any:
    """Paths in a file are meant from where the file is."""
    if isinstance(value, dict):
        return {
            key: str(folder / item) if key == "path" and isinstance(item, str) else _with_paths_from(folder, item)
            for key, item in value.items()
        }
    return [_with_paths_from(folder, item) for item in value] if isinstance(value, list) else value


def load_config(path: str | Path | None, overrides: Sequence[Override] = (), *, world: bool = True) -> RunConfig:
    """Make a run from a TOML file; from the defaults if there is none.

    Raises:
        ConfigError: it can't be used; see `parse_config` for the arguments.
    """
    source = "options" if path is None else str(path)
    return parse_config(read_tree(path), source=source, overrides=overrides, world=world)


def named_variants(tree: Mapping[str, Any], source: str) -> list[tuple[str, dict[str, Any]]]:
    """The `[[variants]]` of a file, each a name and the whole tree with the variant's tables merged in.

    Raises:
        ConfigError: a variant has no name, or isn't a table.
    """
    base = {key: value for key, value in tree.items() if key != "variants"}
    variants = tree.get("variants", [])
    if not isinstance(variants, list):
        raise ConfigError(f"{source}: variants: must be tables; write [[variants]] above each")
    found = []
    for i, variant in enumerate(variants):
        if not isinstance(variant, dict) or not isinstance(variant.get("name"), str):
            raise ConfigError(f"{source}: variants[{i}]: has no name; add name = '...'")
        changes = {key: value for key, value in variant.items() if key != "name"}
        found.append((variant["name"], merged(base, changes)))
    return found

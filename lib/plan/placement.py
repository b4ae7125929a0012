"""Device placement: the first devices of one node, all of the same model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lib.errors import PlanError
from lib.plan.types import STATIC_SHAPES, ConfigView, Decision, Device, Hardware, Kind
from lib.units import GB, counted

ACCEPTED_KINDS: dict[str, tuple[Kind, ...]] = {
    "auto": ("cuda", "rocm", "mps", "xla", "tpu", "cpu"),
    "cuda": ("cuda", "rocm"),
    "mps": ("mps",),
    "xla": ("xla",),
    "tpu": ("tpu",),
    "cpu": ("cpu",),
}
UNKNOWN_CPU = "unknown CPU"  # of a machine that is known by the name of its GPU only
TPU = "TPU"  # torch_xla's device name; torch_tpu appends the generation
NAMES: dict[Kind, str] = {"xla": "XLA devices", "tpu": "TPUs"}
STEP_COMPILER = "XLA"  # of STATIC_SHAPES
OWN_STATISTICS: tuple[Kind, ...] = ("xla",)  # whose processes do not share running statistics
EXPERIMENTAL_XLA = "; EXPERIMENTAL, never run on TPU hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of a run. Bytes are per process: of the fullest GPU, or a share of the node's main memory.

    per_node, host_free_bytes: as of Hardware.
    """

    device: Decision[Kind]
    world: Decision[int]
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None
    per_node: int = 0
    host_free_bytes: int | None = None


def place(config: ConfigView, hardware: Hardware) -> Placement:
    """Choose the devices. Raises PlanError where DEVICE or NUM_DEVICES are not possible here."""
    if hardware.kind not in ACCEPTED_KINDS[config.device]:
        found = f"{hardware.kind} ({_listed([device.name for device in hardware.devices])})"
        raise PlanError(
            f"CONFIG_DEVICE_{config.device.upper()} is not possible",
            why=f"the hardware to plan for is {'a CPU without a GPU' if hardware.kind == 'cpu' else found}",
            todo="set CONFIG_DEVICE_AUTO=y, or plan for other hardware",
        )
    if hardware.kind == "cpu":
        return _place_on_cpu(config, hardware)
    devices, note = identical_devices(hardware, requested=config.num_devices)
    if hardware.kind in STATIC_SHAPES and config.num_devices not in (0, 1, len(devices)):
        raise PlanError(
            f"CONFIG_NUM_DEVICES={config.num_devices} is not possible on {NAMES[hardware.kind]}",
            why=f"one process has one of them, or all {len(devices)} have a process each",
            todo=f"set it to 0, 1 or {len(devices)}",
        )
    slice_name = ""
    if hardware.kind in STATIC_SHAPES:
        from lib.plan.tpus import explain_count

        slice_name = explain_count(devices[0].name, len(devices))
    world = config.num_devices or len(devices)
    used = devices[:world]
    fullest = min(used, key=lambda device: device.free_bytes)
    _check_free(fullest, index=used.index(fullest))
    return Placement(
        device=Decision(hardware.kind, _why_device(config, hardware, fullest, note=note)),
        world=Decision(world, _why_world(config, hardware, available=len(devices), note=note or slice_name)),
        name=fullest.name,
        total_bytes=fullest.total_bytes,
        free_bytes=fullest.free_bytes,
        capability=fullest.capability,
        per_node=hardware.per_node,
        host_free_bytes=hardware.host_free_bytes,
    )


def by_requested_backend(hardware: Hardware, *, device: str) -> Hardware:
    """Return `hardware` as the backend of CONFIG_DEVICE sees it: a named TPU may be used by torch_xla."""
    return replace(hardware, kind="xla") if (device, hardware.kind) == ("xla", "tpu") else hardware


def refuse_static_shapes(kind: Kind, *, what: str) -> None:
    """Raise PlanError on XLA devices and TPUs, because `what` computes on the CPU first."""
    if kind in STATIC_SHAPES:
        raise PlanError(
            f"{what} is not for {NAMES[kind]}",
            why="torch takes no more devices in a process that has made a backward pass",
            todo="add CONFIG_DEVICE_CPU=y, or leave it out",
        )


def check_machines(device: str) -> None:
    """Raise PlanError for a CONFIG_DEVICE that cannot train on several nodes."""
    if device == "tpu":
        from lib.plan.tpus import SEVERAL_HOSTS

        raise PlanError(
            "CONFIG_DEVICE_TPU is for one node",
            why=SEVERAL_HOSTS,
            todo="set CONFIG_DIST_NNODES=1",
        )


def identical_devices(hardware: Hardware, *, requested: int) -> tuple[tuple[Device, ...], str]:
    """Return the GPUs of the commonest model and a note on those left out ("" if none).

    requested: how many are needed (0 = all equal ones). Raises PlanError where there are too few, where no
    model is the commonest, or where those of the commonest are not the first ones.
    """
    if not hardware.devices:
        raise PlanError("there is no device to train on", todo="set CONFIG_DEVICE_CPU=y")
    names = [device.name for device in hardware.devices]
    (name, count), *others = Counter(names).most_common()
    if requested > count:
        mixed = f", not all of one model ({_listed(names)})" if others else ""
        raise PlanError(
            f"CONFIG_NUM_DEVICES={requested}, and the machine has {counted(len(names), 'device')}{mixed}",
            todo=f"set it to {count} or less (0 = all equal ones)",
        )
    if not others:
        return hardware.devices, ""
    if others[0][1] == count:
        raise _mixed(names, why="no model is the commonest, and different GPUs do not train alike")
    if names[:count] != [name] * count:
        raise _mixed(names, why=f"the {count} of the commonest model are not the first ones")
    left_out = _listed([other for other in names if other != name])
    return hardware.devices[:count], f"{left_out} left out, being of another model"


def _place_on_cpu(config: ConfigView, hardware: Hardware) -> Placement:
    memory = hardware.devices[0]
    world = config.num_devices or 1
    _check_free(memory, index=0)
    requested = "CONFIG_DEVICE_CPU=y" if config.device == "cpu" else "there is no GPU"
    cpus = counted(hardware.cpu_count, "CPU")
    share = f", {memory.free_bytes / world / GB:.1f} GB of free memory for each" if world > 1 else ""
    if world > hardware.cpu_count:
        share += f"; MORE than the {cpus} there are, so they wait for each other"
    return Placement(
        device=Decision("cpu", f"{hardware.cpu_name}, {cpus}: {requested}"),
        world=Decision(
            world,
            f"{_requested(world, hardware)}{share}"
            if config.num_devices
            else "one process on CPUs (CONFIG_NUM_DEVICES=0)",
        ),
        name=hardware.cpu_name,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes // world,
        capability=None,
        per_node=hardware.per_node,
    )


def _check_free(device: Device, *, index: int) -> None:
    if device.free_bytes <= 0:
        raise PlanError(
            f"no memory is free on device {index} ({device.name}, {device.total_bytes / GB:.1f} GB)",
            todo="end what is using it, or hide the device with CUDA_VISIBLE_DEVICES",
        )


def _mixed(names: Sequence[str], *, why: str) -> PlanError:
    groups = {name: [str(index) for index, other in enumerate(names) if other == name] for name in names}
    strategies = " or ".join(
        f"CUDA_VISIBLE_DEVICES={','.join(indices)} ({name})" for name, indices in groups.items()
    )
    return PlanError(
        f"the GPUs are mixed: {_listed(names)}", why=why, todo=f"set {strategies} in the environment"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _why_device(config: ConfigView, hardware: Hardware, device: Device, *, note: str) -> str:
    kind, named = hardware.kind, hardware.cpu_name == UNKNOWN_CPU
    requested = f"{'by name' if named else 'preferred to the CPU'} (CONFIG_DEVICE_AUTO=y)"
    if kind in STATIC_SHAPES:
        requested = "by name; NOTE: to train on it set CONFIG_DEVICE_TPU=y (torch_tpu) or _XLA=y (torch_xla)"
    if config.device != "auto":
        requested = f"CONFIG_DEVICE_{config.device.upper()}=y"
    note = f"; {note}" if note else ""
    return f"{device.name}: {requested}{note}" + (EXPERIMENTAL_XLA if kind in STATIC_SHAPES else "")


def _why_world(config: ConfigView, hardware: Hardware, *, available: int, note: str) -> str:
    count, more = config.num_devices, f"; {note}" if note else ""
    if not count:
        those = f"{available} equal {NAMES.get(hardware.kind, 'GPUs')}" if available > 1 else "the only one"
        return f"{those}{more or ' (CONFIG_NUM_DEVICES=0)'}"
    return _requested(count, hardware) + f", the first of {available}" * (count < available) + more


def _requested(count: int, hardware: Hardware) -> str:
    # The number that each node has set is not known.
    return f"{count} processes on all nodes" if hardware.of_all_nodes else f"CONFIG_NUM_DEVICES={count}"


def of_all_nodes(own: Hardware, *, processes: int, world: int) -> Hardware:
    """Return the hardware of `world` processes on nodes like this one, which has `processes`."""
    device, cpus = own.devices[0], max(1, own.cpu_count * world // processes)
    if own.kind == "cpu":  # one memory, shared by all processes
        each = device.free_bytes // processes
        devices: tuple[Device, ...] = (replace(device, free_bytes=each * world),)
    else:
        device = min(own.devices[:processes], key=lambda each: each.free_bytes)
        devices = (device,) * world
    return replace(own, devices=devices, cpu_count=cpus, of_all_nodes=True, per_node=processes)


def grows_with_devices(config: ConfigView) -> str:
    """Return the option by which the effective batch grows with the number of devices; "" where none does."""
    if config.elastic_scale_batch:
        return "CONFIG_ELASTIC_SCALE_BATCH=y"
    if config.hyper_param == "auto":
        return "CONFIG_BATCH_TABLE_STRICT=y" if config.batch_table_strict else ""
    by_hand = config.gradient_accumulation
    return f"CONFIG_GRADIENT_ACCUMULATION={by_hand}" if by_hand else ""

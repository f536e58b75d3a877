"""Several NCCL ranks on one GPU: the environment in which NCCL lets them, and its refusals in plain words.

NCCL refuses two ranks of one host on one GPU. From 2.30 on a variable of its own lifts that. Before, each rank is given
a host of its own (``NCCL_HOSTID``), and the "hosts" talk through sockets. Either way the ranks take turns on the GPU,
so such a run shows *that* something works, not how fast. NCCL looks at these variables once, at its first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ALLOWED_SINCE = (2, 30)
"""The NCCL that knows ``NCCL_MULTI_RANK_GPU_ENABLE``."""

COMMON = {
    "NCCL_MAX_NCHANNELS": "2",  # of 2.17 and later also by CTAS: kernels that wait for a peer must leave it some room
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
}
ALLOWED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
HOST_A_RANK = {
    "NCCL_P2P_DISABLE": "1",  # these three would be tried within a host, which the ranks only seem not to share
    "NCCL_SHM_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NET": "Socket",  # such "hosts" have no other network, whatever plugin the machine brings
    "NCCL_NET_PLUGIN": "none",
}
ONE_MACHINE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}

REFUSALS = (
    "Duplicate GPU detected",  # 2.5 to 2.29
    "Multiple ranks detected using the same GPU",  # 2.30.3
    "Multiple Ranks are using the same GPU/Partition",  # 2.30.7
    "invalid usage",  # what every version says where it does not tell more
)


def nccl_environment(
    rank: int, nccl: tuple[int, ...], own: Mapping[str, str], *, one_machine: bool = True
) -> dict[str, str]:
    """The variables to set for a rank that shares its GPU; those that the user has set are left as they are.

    Args:
        rank: Among all ranks, so that no two of several machines get one name.
        nccl: NCCL's version.
        own: The environment so far.
        one_machine: All ranks are on this machine, so that its loopback will do.
    """
    way = ALLOWED if nccl >= ALLOWED_SINCE else {"NCCL_HOSTID": f"ddp_prof-{rank}", **HOST_A_RANK}
    wanted = {**COMMON, **way, **(ONE_MACHINE if one_machine else {})}
    return {name: value for name, value in wanted.items() if name not in own}


def refusal(message: str, nccl: tuple[int, ...]) -> str | None:
    """NCCL's refusal to let ranks share a GPU as one line with the way out; ``None`` for any other failure."""
    lines = [line.strip() for line in message.splitlines()]
    found = next((line for sign in REFUSALS for line in lines if sign in line), None)
    if found is None:
        return None
    version = ".".join(map(str, nccl))
    return (
        f"NCCL {version} refuses ranks that share a GPU ({found[:120]}): use --backend gloo --device cuda, "
        "or start a rank a GPU"
    )

"""Registers the keys of enrolled nodes at the SuperLink, and removes those of others."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedhen.errors import FleetError, one_line
from fedhen.fleet.certificates import CA
from fedhen.fleet.enrolment import EnrolledNode
from fedhen.fleet.project import FleetProject

REMOVED = "unregistered"
"""Flower's status of a node that was removed. Its key cannot be registered again."""


def open_control(project: FleetProject) -> ControlHttpClient:
    """Opens a client of the SuperLink's control API, which only this machine reaches."""
    return ControlHttpClient.from_server_address(
        project.address,
        not project.secure,
        str(project.certificates / CA) if project.secure else None,
        [RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )


def register_nodes(project: FleetProject, enrolled: Mapping[str, EnrolledNode]) -> list[str]:
    """Makes the SuperLink know exactly the enrolled nodes. Returns a message for each change and each refusal.

    Raises `FleetError` if the SuperLink does not answer.
    """
    messages = []
    try:
        with open_control(project) as control:
            nodes = control.ListNodes(ListNodesRequest()).nodes_info
            known = {node.public_key: node for node in nodes}
            wanted = {node.pem: node for node in enrolled.values()}
            for key, node in known.items():
                if key not in wanted and node.status != REMOVED:
                    control.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
                    messages.append(f"removed node {node.name or node.node_id}")
            for key, new in wanted.items():
                if key in known and known[key].status == REMOVED:
                    messages.append(f"node {new.name} has the key of a node that was removed: enrol it with a new key")
                elif key not in known:
                    control.RegisterNode(RegisterNodeRequest(public_key=key, name=new.name))
                    messages.append(f"registered node {new.name}, tier {new.tier}")
    except (httpx.HTTPError, OSError) as error:
        raise FleetError(f"the SuperLink does not register nodes: {one_line(str(error))}") from None
    return messages

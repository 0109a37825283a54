"""A node's metrics, in the format of Prometheus, on a port of their own."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from skirl.store.remote import part as parts
from skirl.store.remote.node import Node
from skirl.store.remote.wire import NodeError

COUNTERS = {
    "rows": (parts.ROWS, "gauge", "rows held"),
    "memory_bytes": (parts.OWN, "gauge", "memory of the process of a part"),
    "gets_total": (parts.GETS, "counter", "calls that read rows"),
    "puts_total": (parts.PUTS, "counter", "calls that wrote rows"),
    "rows_read_total": (parts.ROWS_OUT, "counter", "rows read"),
    "rows_written_total": (parts.ROWS_IN, "counter", "rows written"),
    "bytes_read_total": (parts.BYTES_OUT, "counter", "bytes of rows read"),
    "bytes_written_total": (parts.BYTES_IN, "counter", "bytes of rows written"),
}


def text(node: Node) -> str:
    """Return all metrics of a node, by owner."""
    served = sorted(node.served.copy().values(), key=lambda each: each.task.owner)
    lines = []
    for name, (at, kind, meaning) in COUNTERS.items():
        lines += [f"# HELP skirl_node_{name} {meaning}", f"# TYPE skirl_node_{name} {kind}"]
        lines += [
            f'skirl_node_{name}{{node="{node.number}",owner="{each.task.owner}",run="{each.task.run}"}} {each.numbers[at]}'
            for each in served
        ]
    lines += ["# TYPE skirl_node_parts gauge", f'skirl_node_parts{{node="{node.number}"}} {len(served)}', ""]
    return "\n".join(lines)


def serve(address: tuple[str, int], look: Callable[[], str]) -> ThreadingHTTPServer:
    """Serve /metrics until `shutdown`."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            body = look().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a line per request would be too much."""

    try:
        server = ThreadingHTTPServer(address, Handler)
    except OSError as error:
        raise NodeError(
            f"metrics cannot be served at {address[0]}:{address[1]} ({error.strerror}): set metrics to a free port"
        ) from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="skirl metrics", daemon=True).start()
    return server

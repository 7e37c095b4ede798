"""What a server sends leaves at once, whoever opened its sockets."""

import socket
from pathlib import Path

from dashboard.sockets import send_at_once


def test_connections_of_a_listening_socket_send_at_once_and_all_else_is_left_as_it_was():
    listening, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with listening, other, socket.socket(socket.AF_UNIX) as local:
        before = sorted(Path("/dev/fd").iterdir())
        send_at_once()

        assert sorted(Path("/dev/fd").iterdir()) == before
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert is_prompt(listening)
            assert is_prompt(accepted)
        assert not is_prompt(other)
        local.bind("")  # as open as before


def is_prompt(one):
    return bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

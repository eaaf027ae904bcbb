"""Several processes that train one network: an engine over sockets, rank 0 in the middle.

A framework for real has an engine of its own, faster than this one.
"""

import functools
import socket
import time
from multiprocessing.connection import Connection

import numpy as np

from compat.backend import Engine, FirstBatch, compare_ranks, count_batch

from .networks import Network


class Sockets(Engine):
    """A connection of each rank to rank 0."""

    def __init__(self, place):
        super().__init__(place)
        with self.waiting("to start"):
            self.connections = self._accept() if place.rank == 0 else [self._connect()]

    def _accept(self):
        """Accept the connections of the other ranks, and return them in order of rank."""
        found = {}
        with self.listen() as listening:
            listening.settimeout(self.timeout)
            while len(found) < self.place.size - 1:
                accepted, _ = listening.accept()
                accepted.setblocking(True)
                connection = Connection(accepted.detach())
                found[self._receive(connection)] = connection
        return [found[rank] for rank in sorted(found)]

    def _connect(self):
        until = time.monotonic() + self.timeout
        while True:
            try:
                connected = socket.create_connection(self.rendezvous(), self.timeout)
                break
            except OSError:  # rank 0 is later
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        connected.setblocking(True)
        connection = Connection(connected.detach())
        connection.send(self.place.rank)
        return connection

    def _receive(self, connection):
        if not connection.poll(self.timeout):
            raise OSError("{:g} seconds are over".format(self.timeout))
        return connection.recv()

    def sum(self, values):
        total = np.array(values, "float64")
        with self.waiting("for the others' gradients"):
            if self.place.rank > 0:
                self.connections[0].send(total)
                return self._receive(self.connections[0])
            for connection in self.connections:
                total += self._receive(connection)
            for connection in self.connections:
                connection.send(total)
        return total

    def broadcast(self, value):
        with self.waiting("for the broadcast from rank 0"):
            if self.place.rank > 0:
                return self._receive(self.connections[0])
            for connection in self.connections:
                connection.send(value)
        return value

    def problem(self, error):
        if isinstance(error, EOFError):
            return "its connection was closed"
        return str(error) if isinstance(error, OSError) else None


def distribute(network, place):
    """Begin with rank 0's weights, and make gradients the mean over the rows of all ranks."""
    engine = Sockets.join(place)
    network.weights, network.velocities = engine.broadcast([network.weights, network.velocities])
    network.gradients = functools.partial(_gradients, network, engine, FirstBatch(engine))
    return network


def _gradients(network, engine, first_batch, inputs, targets):
    if engine.steps % 100 == 1:
        names = ["weight {}".format(place) for place in range(len(network.weights))]
        compare_ranks(engine, names, network.weights, network.weights.__setitem__, engine.steps)
    first_batch.see((inputs, targets))
    share = engine.share(len(inputs))
    loss, gradients = Network.gradients(network, inputs, targets)
    numbers = np.concatenate([[loss]] + [gradient.ravel() for gradient in gradients])
    numbers = engine.sum(share * numbers)
    engine.count("gradients")
    first_batch.compare(type(network).__name__)
    ends = np.cumsum([gradient.size for gradient in gradients])[:-1]
    parts = np.split(numbers[1:], ends)
    count_batch([""], [len(inputs)], training=True)
    return float(numbers[0]), [
        part.reshape(gradient.shape) for part, gradient in zip(parts, gradients)
    ]

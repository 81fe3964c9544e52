"""Messages between host processes: stores to find one another, transports, and the `Communicator`."""

from braidax.comm.communicator import Communicator as Communicator
from braidax.comm.rendezvous import Tuning as Tuning
from braidax.comm.rendezvous import connect as connect
from braidax.comm.request import Request as Request

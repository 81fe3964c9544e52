"""Messages between host processes: stores to find one another, transports, and the `Communicator`."""

from braidax.comm.communicator import Communicator as Communicator
from braidax.comm.joining import from_environment as from_environment
from braidax.comm.rendezvous import Tuning as Tuning
from braidax.comm.rendezvous import connect as connect
from braidax.comm.request import Request as Request
from braidax.comm.stores.file import FileStore as FileStore
from braidax.comm.stores.memory import MemoryStore as MemoryStore
from braidax.comm.stores.redis import RedisStore as RedisStore
from braidax.comm.stores.store import Store as Store
from braidax.comm.stores.tcp import TcpStore as TcpStore
from braidax.comm.stores.tcp_server import TcpStoreServer as TcpStoreServer
from braidax.comm.stores.urls import open_store as open_store
from braidax.comm.transports.in_process import Hub as Hub
from braidax.comm.transports.in_process import InProcessTransport as InProcessTransport
from braidax.comm.transports.transport import Transport as Transport
from braidax.connections.listener import Tls as Tls

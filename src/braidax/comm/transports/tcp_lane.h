/* Lanes: memory that two ranks of a host share, through which the bytes of their link pass no kernel.
 *
 * A lane goes one way. Its writer counts the bytes that it has written, its reader those that it has read; what lies between
 * them is in a ring. Each side keeps its own count to itself as well: what stands in the memory is as hostile as what comes
 * out of a socket. The socket of the link stays: the bodies of large frames go through it, as the kernel has more room for
 * them, and it tells of the peer's end.
 *
 * Who is about to sleep says so in the memory; whoever changes it then rings. tcp_lanes.py makes the memory. */

#ifndef BRAIDAX_TCP_LANE_H
#define BRAIDAX_TCP_LANE_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define APART 128 /* bytes, so that what one core writes is in no line that another one needs for something else */

typedef struct {
    uint64_t value;
    char apart[APART - sizeof(uint64_t)];
} Count;

typedef struct { /* in shared memory */
    Count written, read, reader_sleeps, writer_sleeps, withdrawn; /* the last one: what its writer has lent */
    char ring[];
} Lane;

typedef struct { /* of a lane */
    Lane *lane;
    uint64_t position; /* of the own count */
} LaneEnd;

typedef struct { /* the lanes of a link; no `memory` where it has none */
    void *memory;
    size_t num_bytes; /* of that */
    uint64_t capacity; /* of a ring, a power of two */
    LaneEnd in, out;
    int bell; /* of the peer */
} Lanes;

static void ring_bell(int bell) {
    uint64_t once = 1;
    if (write(bell, &once, sizeof once) < 0) return; /* it is rung often enough */
}

/* To be called behind each change of a count: whoever sleeps until then is woken. */
static void wake(const Lanes *lanes, Count *sleeps) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the change is seen, or that somebody is about to sleep */
    if (__atomic_load_n(&sleeps->value, __ATOMIC_RELAXED) && __atomic_exchange_n(&sleeps->value, 0, __ATOMIC_SEQ_CST))
        ring_bell(lanes->bell);
}

/* Returns how many bytes can be read; more than the capacity where the peer's count makes no sense. */
static uint64_t lane_filled(const Lanes *lanes) {
    return __atomic_load_n(&lanes->in.lane->written.value, __ATOMIC_ACQUIRE) - lanes->in.position;
}

/* Returns how many bytes can be written; more than the capacity where the peer's count makes no sense. */
static uint64_t lane_room(const Lanes *lanes) {
    return lanes->capacity - (lanes->out.position - __atomic_load_n(&lanes->out.lane->read.value, __ATOMIC_ACQUIRE));
}

static size_t smaller(size_t one, uint64_t other) { return other < one ? (size_t)other : one; }

/* Copies between parts and the ring, at most so many bytes, and counts them. Returns how many, or -1 with EPROTO. */
static ssize_t pass(const Lanes *lanes, LaneEnd *end, const struct iovec *parts, size_t count, uint64_t most, int is_reader) {
    if (most > lanes->capacity) return errno = EPROTO, -1;
    Lane *lane = end->lane;
    uint64_t begin = end->position;
    for (size_t i = 0; i < count && most; i++) {
        uint64_t place = end->position % lanes->capacity;
        char *part = parts[i].iov_base, *ring = lane->ring + place;
        size_t num_bytes = smaller(parts[i].iov_len, most), first = smaller(num_bytes, lanes->capacity - place);
        memcpy(is_reader ? part : ring, is_reader ? ring : part, first);
        memcpy(is_reader ? part + first : lane->ring, is_reader ? lane->ring : part + first, num_bytes - first);
        end->position += num_bytes;
        most -= num_bytes;
    }
    if (end->position == begin) return 0;
    __atomic_store_n(is_reader ? &lane->read.value : &lane->written.value, end->position, __ATOMIC_RELEASE);
    wake(lanes, is_reader ? &lane->writer_sleeps : &lane->reader_sleeps);
    return (ssize_t)(end->position - begin);
}

static ssize_t read_lane(Lanes *lanes, const struct iovec *parts, size_t count) {
    return pass(lanes, &lanes->in, parts, count, lane_filled(lanes), 1);
}

static ssize_t write_lane(Lanes *lanes, const struct iovec *parts, size_t count) {
    return pass(lanes, &lanes->out, parts, count, lane_room(lanes), 0);
}

static void withdraw(const Lanes *lanes) {
    if (lanes->memory) __atomic_store_n(&lanes->out.lane->withdrawn.value, 1, __ATOMIC_SEQ_CST);
}

/* Whether what was copied out of the peer's memory may be something else. */
static int is_withdrawn(const Lanes *lanes) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* it was copied before */
    return __atomic_load_n(&lanes->in.lane->withdrawn.value, __ATOMIC_SEQ_CST) != 0;
}

static void say_asleep(Count *sleeps, uint64_t value) { __atomic_store_n(&sleeps->value, value, __ATOMIC_RELAXED); }

/* Maps the lanes of a link, of which the rank that `is_first` writes the first one. Returns -1 with errno. */
static int open_lanes(Lanes *lanes, int descriptor, int is_first, int bell) {
    struct stat status;
    if (fstat(descriptor, &status) < 0) return -1;
    size_t num_bytes = (size_t)status.st_size, half = num_bytes / 2;
    if (half <= sizeof(Lane) || half % APART) return errno = EPROTO, -1;
    uint64_t capacity = half - sizeof(Lane);
    if (capacity & (capacity - 1)) return errno = EPROTO, -1;
    char *memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) return -1;
    Lane *first = (Lane *)memory, *second = (Lane *)(memory + half);
    *lanes = (Lanes){memory, num_bytes, capacity, {is_first ? second : first, 0}, {is_first ? first : second, 0}, bell};
    return 0;
}

static void close_lanes(Lanes *lanes) {
    if (lanes->memory) munmap(lanes->memory, lanes->num_bytes);
    *lanes = (Lanes){.memory = NULL};
}

#endif

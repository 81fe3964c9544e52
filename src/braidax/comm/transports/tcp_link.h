/* One connection of the TCP transport: what waits to be written, and what waits to be read. tcp_link.py says the same in
 * Python, and what the frames mean. */

#ifndef BRAIDAX_TCP_LINK_H
#define BRAIDAX_TCP_LINK_H

#include <endian.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "tcp_lane.h"

#define FRAME_BYTES 80
#define STAGE_BYTES (1 << 16)    /* many small messages are read at once */
#define KEEP_BYTES (1 << 22)     /* of messages from one peer that nobody has asked for yet */
#define ENTRY_BYTES 64           /* what keeping a message costs besides its bytes */
#define OWED_BYTES (KEEP_BYTES / 2) /* of room that is given back in a frame of its own */
#define OFFER_BYTES (KEEP_BYTES / 4 * 3) /* of an offered message that go with its announcement */
#define LINE_BYTES 64            /* of a cache */
#define REST_BYTES (1 << 24)     /* of a frame, between two of which the peer can be asked for something */
#define SMALL_BYTES (1 << 16)    /* a message that is kept at once */
#define JOINED_BYTES (1 << 12)   /* of frames that are copied, as one part is handed over quicker than two */
#define TURN_BYTES (1 << 22)     /* read from one peer before others have their turn */
#define MAX_PARTS 64             /* handed to the kernel in one call */
#define MAX_TAG (((uint64_t)1 << 44) - 1)
#define KIND_SHIFT 56
#define OUTSIDE_SHIFT 55         /* of a bit: the body of a frame in a lane comes through the socket */
#define OUTSIDE_BYTES (1 << 16)  /* a body of more bytes does */
#define LANE_STAGE_BYTES 1024    /* read of a lane at once: the rest of a frame goes straight to its place */
#define WORDS_BYTES 160
#define CLOSED "it closed its communicator"
#define CLOSED_ITS_END "its end of the connection was closed"
#define GIVEN_UP "this rank gave it up"
#define BROKE "the connection to it broke: "
#define NO_MEMORY "there is no memory for its messages"
#define MAX_FREE 256             /* messages and frames that are used again */

enum { WHOLE, OFFER, REST, GO, ROOM, BYE, TAKEN }; /* kinds of frames; the last one in lanes only, see tcp_lending.h */
enum { OK, TOO_LONG, LOST, MUTE };          /* how requests end */

/* Queues by number: of those under one number the oldest is found first. */

typedef struct Item {
    struct Item *next;
    uint64_t key;
} Item;

typedef struct {
    Item **first, ***last; /* of each bucket */
    size_t num_buckets, count;
} Table;

typedef struct Request Request;

typedef struct Frame { /* that is to be written */
    struct Frame *next;
    Request *request; /* whose message it carries; NULL for a header alone */
    size_t sent, inside;
    int is_outside;
    char header[FRAME_BYTES];
} Frame;

struct Request { /* a send or receive that has not ended, or that Python does not know to have ended */
    Ticket ticket;   /* one of a run has no operation and no views */
    Item item;       /* of `posted` or `offered` of its link */
    Request *previous, *next, *next_ended;
    PyObject *operation;
    Caller *caller; /* in place of an operation */
    Py_buffer *views, one;
    Py_ssize_t num_views;
    struct iovec *parts, headed[2]; /* what is sent, from `part` on */
    size_t num_parts, part, left;
    char *data;      /* where what is received goes */
    size_t capacity;
    uint32_t number; /* of an offered message */
    int is_offered, is_queued, is_asked, is_lent, is_large;
    Frame frame;     /* of what is sent */
};

typedef struct Message { /* a message that comes: into its place, to be kept (no request), or dropped (no data) */
    Item item; /* of `kept` or `asked` of its link */
    uint64_t tag, num_bytes, received;
    size_t charge;   /* of the room that its sender took for it */
    uint32_t number; /* of an offered one */
    int is_offered, is_taken;
    Request *request;
    char *data, *memory;
    struct Message *next_lent;
    uint64_t address, lent_from, borrowed; /* of what the peer lends: from a byte of it on; 0 for none */
} Message;

typedef struct Link {
    struct Link *next_hot;
    int descriptor;
    unsigned rank;
    uint32_t watched;
    int is_hot, is_paused, has_left, is_broken, is_mute, is_lost, is_large; /* large: what was read last */
    Frame *outgoing, **last;
    Table offered, posted, kept, asked; /* requests by number and tag, messages by tag and number */
    uint32_t num_offered;
    int64_t room;          /* of what may be sent that nobody asked for */
    size_t owed, held;     /* room to be given back; room that the peer has taken */
    char *stage;
    size_t begin, end;     /* of what the stage holds */
    Message *message;      /* that is being read */
    uint64_t missing;      /* bytes of it in this frame */
    int is_outside;        /* they come through the socket, though there is a lane */
    Lanes lanes;
    Message *lent, **last_lent; /* that the peer lends, and a place waits for */
    pid_t process;              /* of the peer */
    int lends, borrows;
    char mute_words[WORDS_BYTES], lost_words[WORDS_BYTES];
} Link;

struct Worker {
    PyObject_HEAD
    Runs runs;
    int selector, is_busy, is_crowded, num_broken, num_blocked; /* blocked: links with something to write */
    PyObject *failed;
    Link *links, *hot; /* hot: links on which something is waited for */
    unsigned num_hot;
    Link **laned; /* the links with lanes */
    unsigned num_laned;
    int bell, is_armed; /* the bell is that of this rank, -1 for none */
    Request *pending, *ended, **ended_end, *freed;
    size_t num_freed;
    Frame *free_frames;
    Message *free_messages;
    size_t num_free_frames, num_free_messages;
    unsigned round;
    char *dropped; /* where goes what nobody wants */
};

#define OF(type, field, pointer) ((type *)((char *)(pointer) - offsetof(type, field)))

/* Tables */

static size_t bucket_of(const Table *table, uint64_t key) {
    return (size_t)((key * 0x9E3779B97F4A7C15u) >> 32) & (table->num_buckets - 1);
}

static void append_item(Table *table, Item *item) {
    size_t bucket = bucket_of(table, item->key);
    item->next = NULL;
    *table->last[bucket] = item;
    table->last[bucket] = &item->next;
}

static int grow(Table *table) {
    Table larger = {.num_buckets = table->num_buckets ? 4 * table->num_buckets : 16, .count = table->count};
    larger.first = malloc(larger.num_buckets * sizeof *larger.first);
    larger.last = malloc(larger.num_buckets * sizeof *larger.last);
    if (!larger.first || !larger.last) return free(larger.first), free(larger.last), -1;
    for (size_t i = 0; i < larger.num_buckets; i++) {
        larger.first[i] = NULL;
        larger.last[i] = &larger.first[i];
    }
    for (size_t i = 0; i < table->num_buckets; i++)
        for (Item *item = table->first[i], *next; item; item = next) {
            next = item->next;
            append_item(&larger, item);
        }
    free(table->first);
    free(table->last);
    *table = larger;
    return 0;
}

/* Returns -1 without memory. */
static int put_item(Table *table, Item *item) {
    if (table->count >= table->num_buckets && grow(table) < 0 && !table->num_buckets) return -1;
    append_item(table, item);
    table->count++;
    return 0;
}

static Item *find_item(const Table *table, uint64_t key) {
    if (!table->count) return NULL;
    Item *item = table->first[bucket_of(table, key)];
    while (item && item->key != key) item = item->next;
    return item;
}

/* Takes one item out; without `item` the oldest one under the key, if there is one. */
static Item *take_item(Table *table, uint64_t key, const Item *item) {
    if (!table->count) return NULL;
    size_t bucket = bucket_of(table, key);
    for (Item **link = &table->first[bucket]; *link; link = &(*link)->next) {
        Item *found = *link;
        if (item ? found != item : found->key != key) continue;
        if (!(*link = found->next)) table->last[bucket] = link;
        table->count--;
        return found;
    }
    return NULL;
}

/* Takes any item out; NULL when none is left. */
static Item *take_any(Table *table) {
    for (size_t i = 0; table->count && i < table->num_buckets; i++)
        if (table->first[i]) return take_item(table, table->first[i]->key, table->first[i]);
    return NULL;
}

static void free_table(Table *table) {
    free(table->first);
    free(table->last);
    *table = (Table){.count = 0};
}

/* Messages and frames */

static Message *new_message(Worker *self) {
    Message *message = self->free_messages;
    if (message) {
        self->free_messages = (Message *)message->item.next;
        self->num_free_messages--;
        memset(message, 0, sizeof *message);
        return message;
    }
    return calloc(1, sizeof *message);
}

static void free_message(Worker *self, Message *message) {
    free(message->memory);
    if (self->num_free_messages >= MAX_FREE) {
        free(message);
        return;
    }
    self->num_free_messages++;
    message->item.next = (Item *)self->free_messages;
    self->free_messages = message;
}

static Frame *new_frame(Worker *self) {
    Frame *frame = self->free_frames;
    if (!frame) return malloc(sizeof *frame);
    self->free_frames = frame->next;
    self->num_free_frames--;
    return frame;
}

static void free_frame(Worker *self, Frame *frame) {
    if (self->num_free_frames >= MAX_FREE) {
        free(frame);
        return;
    }
    self->num_free_frames++;
    frame->next = self->free_frames;
    self->free_frames = frame;
}

/* Fills in a header, which gives back what room is owed. */
static void head_frame(Link *link, Frame *frame, unsigned kind, uint64_t tag, uint64_t num_bytes, uint64_t inside,
                       uint32_t number) {
    frame->is_outside = link->lanes.memory && inside > OUTSIDE_BYTES;
    uint64_t word = (uint64_t)kind << KIND_SHIFT | (uint64_t)frame->is_outside << OUTSIDE_SHIFT | tag;
    uint64_t words[3] = {htole64(word), htole64(num_bytes), htole64(inside)};
    uint32_t numbers[2] = {htole32(number), htole32((uint32_t)link->owed)};
    memcpy(frame->header, words, sizeof words);
    memcpy(frame->header + sizeof words, numbers, sizeof numbers);
    memset(frame->header + sizeof words + sizeof numbers, 0, FRAME_BYTES - sizeof words - sizeof numbers);
    link->held -= link->owed;
    link->owed = 0;
    frame->sent = 0;
    frame->inside = (size_t)inside;
}

/* Returns the room that a frame takes at its receiver. */
static size_t charge_of(unsigned kind, uint64_t inside) {
    return kind == WHOLE || inside ? (size_t)inside + ENTRY_BYTES : 0;
}

/* Ends and losses */

static void end_of_run(Request *request);

static void end(Worker *self, Request *request, int status) {
    if (request->ticket.has_ended) return;
    request->ticket.status = status;
    request->ticket.has_ended = 1;
    self->runs.num_large -= (size_t)request->is_large;
    if (request->ticket.run) {
        end_of_run(request);
        return;
    }
    *self->ended_end = request;
    self->ended_end = &request->next_ended;
}

/* Whether what is to be written next goes through the socket. */
static int is_for_socket(const Link *link) {
    const Frame *frame = link->outgoing;
    return frame && (!link->lanes.memory || (frame->is_outside && frame->sent >= FRAME_BYTES));
}

/* Asks to hear of what can be of use now: of room where something waits, of bytes where they may be read. */
static void watch(Worker *self, Link *link) {
    uint32_t wanted = (is_for_socket(link) ? EPOLLOUT : 0) | (link->is_paused ? 0 : EPOLLIN);
    if (wanted == link->watched || link->is_lost || link->descriptor < 0) return;
    struct epoll_event event = {.events = wanted, .data.ptr = link};
    int how = !wanted ? EPOLL_CTL_DEL : link->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    epoll_ctl(self->selector, how, link->descriptor, &event);
    self->num_blocked += ((wanted & EPOLLOUT) != 0) - ((link->watched & EPOLLOUT) != 0);
    link->watched = wanted;
}

static void end_unsent(Worker *self, Link *link, int status) {
    for (Frame *frame; (frame = link->outgoing);) {
        link->outgoing = frame->next;
        if (!frame->request) {
            free_frame(self, frame);
            continue;
        }
        frame->request->is_queued = 0;
        if (!frame->request->is_offered || frame->request->is_asked) end(self, frame->request, status);
    }
    link->last = &link->outgoing;
    for (Item *item; (item = take_any(&link->offered));) end(self, OF(Request, item, item), status);
}

/* Ends all requests of a peer whose connection is gone; what it sent before stays. */
static void lose(Worker *self, Link *link, const char *begin, const char *words) {
    if (link->is_lost) return;
    if (link->has_left) begin = CLOSED, words = "";
    snprintf(link->lost_words, WORDS_BYTES, "%s%s", begin, words);
    self->num_blocked -= (link->watched & EPOLLOUT) != 0;
    if (link->watched) epoll_ctl(self->selector, EPOLL_CTL_DEL, link->descriptor, NULL);
    link->watched = 0;
    link->is_lost = 1;
    link->lent = NULL;
    withdraw(&link->lanes);
    if (link->descriptor >= 0) shutdown(link->descriptor, SHUT_RDWR); /* whoever owns the socket closes it */
    for (Item *item; (item = take_any(&link->posted));) end(self, OF(Request, item, item), LOST);
    if (link->message && link->message->is_offered && link->message->is_taken) link->message = NULL; /* it is in `asked` */
    if (link->message && link->message->is_taken) {
        if (link->message->request) end(self, link->message->request, LOST);
        free_message(self, link->message);
    }
    link->message = NULL;
    for (Item *item; (item = take_any(&link->asked));) {
        Message *message = OF(Message, item, item);
        if (message->request) end(self, message->request, LOST);
        free_message(self, message);
    }
    end_unsent(self, link, LOST);
}

static void lose_by_error(Worker *self, Link *link, int number) {
    char words[WORDS_BYTES];
    snprintf(words, sizeof words, "[Errno %d] %s", number, strerror(number));
    lose(self, link, BROKE, words);
}

#endif

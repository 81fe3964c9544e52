/* Writes and reads the frames of the TCP transport's links. The GIL may not be held. What comes from a peer is hostile
 * until it was checked: it takes no memory but within its room, and what it should not have sent costs it the link. */

#ifndef BRAIDAX_TCP_MOVING_H
#define BRAIDAX_TCP_MOVING_H

#include "tcp_lending.h"
#include "tcp_link.h"

#define MAX_HOT 4 /* links that are read without asking first whether there is something */

static unsigned read_link(Worker *self, Link *link);

static void heat(Worker *self, Link *link) {
    if (link->is_hot || link->descriptor < 0 || link->lanes.memory) return; /* lanes are looked at all the time */
    link->is_hot = 1;
    link->next_hot = self->hot;
    self->hot = link;
    self->num_hot++;
}

/* Writing */

static void queue_last(Link *link, Frame *frame) {
    frame->next = NULL;
    *link->last = frame;
    link->last = &frame->next;
    if (frame->request) frame->request->is_queued = 1;
}

/* Queues the next part of an offered message that the peer has asked for. */
static void queue_rest(Link *link, Request *request) {
    size_t inside = request->left < REST_BYTES ? request->left : REST_BYTES;
    head_frame(link, &request->frame, REST, 0, 0, inside, request->number);
    queue_last(link, &request->frame);
}

static void frame_is_written(Worker *self, Link *link, Frame *frame) {
    Request *request = frame->request;
    if (!(link->outgoing = frame->next)) link->last = &link->outgoing;
    if (!request) {
        free_frame(self, frame);
        return;
    }
    request->is_queued = 0;
    if (!request->is_offered || (request->is_asked && !request->left)) end(self, request, OK);
    else if (request->is_asked) queue_rest(link, request);
}

/* Returns how many parts are to be written now, and their bytes: all to the lane, or to the socket. */
static size_t gather(const Link *link, struct iovec *parts, size_t *num_bytes) {
    size_t count = 0;
    *num_bytes = 0;
    for (const Frame *frame = link->outgoing; frame && count < MAX_PARTS; frame = frame->next) {
        size_t left = frame->inside;
        if (frame->sent < FRAME_BYTES)
            parts[count++] = (struct iovec){(char *)frame->header + frame->sent, FRAME_BYTES - frame->sent};
        else left -= frame->sent - FRAME_BYTES;
        if (frame->is_outside && frame->sent < FRAME_BYTES) break; /* its body comes when this is written */
        for (size_t i = frame->request ? frame->request->part : 0; left && count < MAX_PARTS; i++) {
            struct iovec part = frame->request->parts[i];
            if (part.iov_len > left) part.iov_len = left;
            left -= part.iov_len;
            if (part.iov_len) parts[count++] = part;
        }
        if (left || frame->is_outside) break;
    }
    for (size_t i = 0; i < count; i++) *num_bytes += parts[i].iov_len;
    return count;
}

static void skip_written(Request *request, size_t num_bytes) {
    request->left -= num_bytes;
    while (num_bytes) {
        struct iovec *part = &request->parts[request->part];
        size_t count = part->iov_len < num_bytes ? part->iov_len : num_bytes;
        part->iov_base = (char *)part->iov_base + count;
        part->iov_len -= count;
        num_bytes -= count;
        if (!part->iov_len) request->part++;
    }
}

static void note_written(Worker *self, Link *link, size_t num_bytes) {
    while (num_bytes) {
        Frame *frame = link->outgoing;
        if (frame->sent < FRAME_BYTES) {
            size_t count = FRAME_BYTES - frame->sent < num_bytes ? FRAME_BYTES - frame->sent : num_bytes;
            frame->sent += count;
            num_bytes -= count;
            if (frame->sent < FRAME_BYTES) return;
        }
        size_t left = FRAME_BYTES + frame->inside - frame->sent, count = left < num_bytes ? left : num_bytes;
        if (count) skip_written(frame->request, count);
        frame->sent += count;
        num_bytes -= count;
        if (count == left) frame_is_written(self, link, frame);
    }
}

static ssize_t write_parts(Link *link, struct iovec *parts, size_t count, size_t num_bytes) {
    if (!is_for_socket(link)) return write_lane(&link->lanes, parts, count);
    int descriptor = link->descriptor;
    char joined[JOINED_BYTES + FRAME_BYTES], *end = joined;
    if (count > 1 && num_bytes <= sizeof joined) {
        for (size_t i = 0; i < count; i++) end = mempcpy(end, parts[i].iov_base, parts[i].iov_len);
        return send(descriptor, joined, num_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    return sendmsg(descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Gives the lane or the kernel what it takes now. */
static void flush(Worker *self, Link *link) {
    while (link->outgoing && !link->is_broken && !link->is_lost) {
        struct iovec parts[MAX_PARTS];
        size_t num_bytes, count = gather(link, parts, &num_bytes);
        ssize_t written = write_parts(link, parts, count, num_bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
            link->is_broken = errno; /* see settle_broken */
            self->num_broken++;
        }
        if (written < 0) break;
        note_written(self, link, (size_t)written);
        if ((size_t)written < num_bytes) break;
    }
    watch(self, link);
}

/* Ends the sends to peers that take no more; what they sent before can still be read. */
static void settle_broken(Worker *self) {
    self->num_broken = 0;
    for (unsigned i = 0; i < self->runs.num_peers; i++) {
        Link *link = &self->links[i];
        if (!link->is_broken || link->is_mute || link->is_lost) continue;
        if (!link->is_paused) read_link(self, link); /* whether it went on purpose */
        if (link->is_lost) continue;
        link->is_mute = 1;
        if (link->has_left) snprintf(link->mute_words, WORDS_BYTES, "%s", CLOSED);
        else snprintf(link->mute_words, WORDS_BYTES, BROKE "[Errno %d] %s", link->is_broken, strerror(link->is_broken));
        withdraw(&link->lanes);
        end_unsent(self, link, MUTE);
        watch(self, link);
    }
}

/* Queues a frame without bytes before all that is not begun. */
static void put_first(Worker *self, Link *link, unsigned kind, uint32_t number, uint64_t num_bytes) {
    if (link->is_mute || link->is_lost) return;
    Frame *frame = new_frame(self);
    if (!frame) {
        lose(self, link, "", NO_MEMORY);
        return;
    }
    frame->request = NULL;
    head_frame(link, frame, kind, 0, num_bytes, 0, number);
    Frame *first = link->outgoing;
    if (!first) {
        queue_last(link, frame);
        flush(self, link);
    } else if (first->sent) {
        frame->next = first->next;
        first->next = frame;
        if (link->last == &first->next) link->last = &frame->next;
    } else {
        frame->next = first;
        link->outgoing = frame;
    }
}

/* Messages */

static void drop_or_finish(Worker *self, Message *message) {
    if (message->request) {
        message->request->ticket.num_bytes = (size_t)message->num_bytes;
        end(self, message->request, OK);
    }
    free_message(self, message);
}

/* Lets a receive have a message, as much of it as is here, and asks for the rest. */
static void match(Worker *self, Link *link, Message *message, Request *request) {
    int is_whole = message->received == message->num_bytes;
    message->is_taken = 1;
    if (message->num_bytes > request->capacity) {
        request->ticket.num_bytes = (size_t)message->num_bytes;
        message->data = NULL;
        end(self, request, TOO_LONG);
    } else if (link->is_lost && !is_whole) {
        free_message(self, message);
        end(self, request, LOST);
        return;
    } else {
        if (message->received && message->data != request->data)
            memcpy(request->data, message->data, (size_t)message->received);
        message->data = request->data;
        message->request = request;
    }
    free(message->memory);
    message->memory = NULL;
    int is_offered = message->is_offered, is_lent = message->address && link->borrows;
    uint32_t number = message->number;
    link->owed += message->charge;
    if (is_whole) {
        drop_or_finish(self, message);
    } else if (link->is_lost) { /* it is dropped, and nothing comes any more */
        free_message(self, message);
    } else if (is_offered) {
        message->item.key = number;
        if (put_item(&link->asked, &message->item) < 0) {
            lose(self, link, "", NO_MEMORY);
            return;
        }
        heat(self, link);
    }
    if (link->is_lost) return;
    if (is_offered && !is_whole && is_lent) queue_lent(link, message);
    else if (is_offered) put_first(self, link, GO, number, link->lanes.memory && !link->borrows ? CANNOT_BORROW : 0);
    else if (link->owed >= OWED_BYTES) put_first(self, link, ROOM, 0, 0);
}

/* Gives a message to the oldest receive for it, or keeps it for the next one. */
static void arrive(Worker *self, Link *link, Message *message) {
    Item *posted = take_item(&link->posted, message->tag, NULL);
    if (posted) {
        match(self, link, message, OF(Request, item, posted));
        return;
    }
    message->item.key = message->tag;
    if (put_item(&link->kept, &message->item) == 0) return;
    if (link->message == message) link->message = NULL;
    free_message(self, message);
    lose(self, link, "", NO_MEMORY);
}

/* Reading */

static char *with_commas(char *end, uint64_t number) {
    int digits = 0;
    do {
        if (digits && digits % 3 == 0) *--end = ',';
        *--end = (char)('0' + number % 10);
        digits++;
    } while (number /= 10);
    return end;
}

static void refuse_length(Worker *self, Link *link, uint64_t inside, uint64_t num_bytes) {
    char first[32] = "", second[32] = "", words[WORDS_BYTES];
    snprintf(words, sizeof words, "it sent %s of %s bytes, for which it was given no room", with_commas(first + 31, inside),
             with_commas(second + 31, num_bytes));
    lose(self, link, BROKE, words);
}

/* A small message that is here as a whole goes straight to the receive that waits for it. */
static void end_small(Worker *self, Link *link, Request *request, size_t num_bytes, size_t charge) {
    take_item(&link->posted, request->item.key, &request->item);
    memcpy(request->data, link->stage + link->begin, num_bytes);
    link->begin += num_bytes;
    link->owed += charge;
    request->ticket.num_bytes = num_bytes;
    end(self, request, OK);
    if (link->owed >= OWED_BYTES) put_first(self, link, ROOM, 0, 0);
}

static void begin_message(Worker *self, Link *link, unsigned kind, uint64_t tag, uint64_t num_bytes, uint64_t inside,
                          uint32_t number, uint64_t address) {
    size_t charge = inside > KEEP_BYTES ? KEEP_BYTES + 1 : charge_of(kind, inside);
    if (link->held + charge > KEEP_BYTES || inside > num_bytes || tag > MAX_TAG || (kind == WHOLE && inside < num_bytes)) {
        refuse_length(self, link, inside, num_bytes);
        return;
    }
    link->held += charge;
    Item *item = find_item(&link->posted, tag);
    Request *posted = item ? OF(Request, item, item) : NULL;
    int has_place = posted && posted->capacity >= num_bytes;
    if (has_place && kind == WHOLE && !link->is_outside && inside <= link->end - link->begin) {
        end_small(self, link, posted, (size_t)inside, charge);
        return;
    }
    Message *message = new_message(self);
    if (message && inside && !posted) message->data = message->memory = malloc((size_t)inside);
    if (!message || (inside && !posted && !message->memory)) {
        if (message) free_message(self, message);
        lose(self, link, "", NO_MEMORY);
        return;
    }
    message->tag = tag;
    message->num_bytes = num_bytes;
    message->charge = charge;
    message->is_offered = kind == OFFER;
    message->address = kind == OFFER ? address : 0;
    message->lent_from = inside;
    message->number = number;
    if (inside) {
        link->message = message;
        link->missing = inside;
        link->is_large = inside > LARGE_BYTES;
    }
    arrive(self, link, message);
}

/* Returns the item of a lent message that the peer has taken; NULL where it can have taken none. */
static Item *take_lent(Link *link, uint32_t number) {
    Item *item = find_item(&link->offered, number);
    if (!item || OF(Request, item, item)->is_queued || !OF(Request, item, item)->is_lent) return NULL;
    return take_item(&link->offered, number, item);
}

/* The peer asks for the rest of an offered message. */
static void go_on(Worker *self, Link *link, Request *request) {
    request->is_asked = 1;
    if (request->is_queued) return; /* its begin is being written */
    if (!request->left) {
        end(self, request, OK);
        return;
    }
    int is_idle = !link->outgoing;
    queue_rest(link, request);
    if (is_idle) flush(self, link);
}

static void read_header(Worker *self, Link *link) {
    uint64_t words[3];
    uint32_t numbers[2];
    const char *header = link->stage + link->begin;
    memcpy(words, header, sizeof words);
    memcpy(numbers, header + sizeof words, sizeof numbers);
    unsigned kind = (unsigned)(le64toh(words[0]) >> KIND_SHIFT);
    uint64_t outside = link->lanes.memory ? le64toh(words[0]) & (uint64_t)1 << OUTSIDE_SHIFT : 0;
    uint64_t tag = (le64toh(words[0]) & (((uint64_t)1 << KIND_SHIFT) - 1)) ^ outside, num_bytes = le64toh(words[1]), inside = le64toh(words[2]);
    uint32_t number = le32toh(numbers[0]), given = le32toh(numbers[1]);
    uint64_t address = 0;
    if (link->lanes.memory) memcpy(&address, header + ADDRESS_PLACE, sizeof address);
    Item *item;
    if ((kind == WHOLE || kind == OFFER) && num_bytes > SMALL_BYTES && !link->posted.count && !link->offered.count &&
        !link->asked.count) {
        link->is_paused = 1; /* until a receive is posted, or the peer has to be heard */
        return;
    }
    link->begin += FRAME_BYTES;
    link->room += given;
    link->is_outside = outside && inside && kind <= REST;
    if (kind == WHOLE || kind == OFFER) {
        begin_message(self, link, kind, tag, num_bytes, inside, number, address);
    } else if (kind == REST && inside && (item = find_item(&link->asked, number))) {
        Message *message = OF(Message, item, item);
        if (inside > message->num_bytes - message->received) {
            lose(self, link, BROKE, "it sent more of a message than it had announced");
            return;
        }
        link->message = message;
        link->missing = inside;
        link->is_large = 1;
    } else if (kind == GO && (item = take_item(&link->offered, number, NULL))) {
        if (num_bytes == CANNOT_BORROW) link->lends = 0;
        go_on(self, link, OF(Request, item, item));
    } else if (kind == TAKEN && link->lanes.memory && (item = take_lent(link, number))) {
        end(self, OF(Request, item, item), OK);
    } else if (kind == BYE) {
        link->has_left = 1;
    } else if (kind != ROOM) {
        char whole[WORDS_BYTES];
        snprintf(whole, sizeof whole, "it sent a frame of kind %u and number %u that nobody expects", kind, number);
        lose(self, link, BROKE, whole);
    }
}

/* Reads what is there of parts. Returns 0 when there is nothing, also when the link is lost for that. */
static size_t read_parts(Worker *self, Link *link, struct iovec *parts, size_t count) {
    if (link->lanes.memory && !link->is_outside) {
        ssize_t read = read_lane(&link->lanes, parts, count);
        if (read < 0) lose_by_error(self, link, errno);
        return read < 0 ? 0 : (size_t)read;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    ssize_t found;
    do {
        found = count == 1 ? recv(link->descriptor, parts->iov_base, parts->iov_len, MSG_DONTWAIT)
                           : recvmsg(link->descriptor, &message, MSG_DONTWAIT);
    } while (found < 0 && errno == EINTR);
    if (found == 0) lose(self, link, "", CLOSED_ITS_END);
    else if (found < 0 && errno != EAGAIN && errno != EWOULDBLOCK) lose_by_error(self, link, errno);
    return found < 0 ? 0 : (size_t)found;
}

/* Reads many small messages at once; behind a large one the next is expected to be large, and the header comes alone. */
static size_t fill(Worker *self, Link *link, int *is_drained) {
    if (link->begin) memmove(link->stage, link->stage + link->begin, link->end - link->begin);
    link->end -= link->begin;
    link->begin = 0;
    size_t most = link->lanes.memory ? LANE_STAGE_BYTES : link->is_large ? FRAME_BYTES : STAGE_BYTES;
    struct iovec part = {link->stage + link->end, most - link->end};
    size_t count = read_parts(self, link, &part, 1);
    *is_drained = count < part.iov_len;
    link->end += count;
    return count;
}

/* Reads the next bytes of a message, and the header behind them. */
static size_t read_body(Worker *self, Link *link, int *is_drained) {
    Message *message = link->message;
    size_t staged = link->is_outside ? 0 : link->end - link->begin, count, found = 0;
    if (staged) {
        count = staged < link->missing ? staged : (size_t)link->missing;
        if (message->data) memcpy(message->data + message->received, link->stage + link->begin, count);
        link->begin += count;
    } else {
        size_t space = message->data || link->missing < STAGE_BYTES ? (size_t)link->missing : STAGE_BYTES;
        struct iovec parts[2] = {{message->data ? message->data + message->received : self->dropped, space},
                                 {link->stage, FRAME_BYTES}};
        int is_last = space == link->missing && !link->is_outside;
        found = read_parts(self, link, parts, is_last ? 2 : 1);
        *is_drained = found < space + (is_last ? FRAME_BYTES : 0);
        if (link->is_lost) return found;
        count = found < space ? found : space;
        if (!link->is_outside) {
            link->begin = 0;
            link->end = found - count;
        }
    }
    message->received += count;
    link->missing -= count;
    if (!link->missing) {
        link->message = NULL;
        link->is_outside = 0;
        if (message->received == message->num_bytes && message->is_taken) {
            if (message->is_offered) take_item(&link->asked, message->item.key, &message->item);
            drop_or_finish(self, message);
        }
    }
    return found;
}

/* Reads what has come, but not for ever: others have their turn. Returns whether that was something. */
static unsigned read_link(Worker *self, Link *link) {
    size_t num_bytes = 0;
    int is_drained = 0, is_socket_drained = 0; /* where there is a lane, that is the other one */
    if (link->descriptor < 0) return 0;
    while (!link->is_paused && !link->is_lost) {
        if (link->message && link->is_outside) {
            if (is_socket_drained || num_bytes >= TURN_BYTES) break;
            num_bytes += read_body(self, link, &is_socket_drained);
            continue;
        }
        int may_read = !is_drained && num_bytes < TURN_BYTES;
        if (link->message && (may_read || link->begin < link->end)) num_bytes += read_body(self, link, &is_drained);
        else if (!link->message && link->end - link->begin >= FRAME_BYTES) read_header(self, link);
        else if (may_read) num_bytes += fill(self, link, &is_drained);
        else break;
    }
    watch(self, link);
    return num_bytes > 0;
}

/* To be called when there is news of the socket of a link with lanes: whether its peer has ended. What that wrote before is
 * read first. */
static void look_for_end(Worker *self, Link *link) {
    char byte;
    if (link->is_lost || link->is_paused || (link->message && link->is_outside)) return;
    ssize_t found = recv(link->descriptor, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    int error = found < 0 ? errno : 0;
    if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) return;
    if (found > 0 && !lane_filled(&link->lanes)) lose(self, link, BROKE, "it sent bytes that no frame announced");
    while (!link->is_lost && !link->is_paused && lane_filled(&link->lanes) && !(link->message && link->is_outside))
        read_link(self, link);
    if (found > 0 || link->is_lost || link->is_paused || (link->message && link->is_outside)) return;
    if (error) lose_by_error(self, link, error);
    else lose(self, link, "", CLOSED_ITS_END);
}

static void resume(Worker *self, Link *link) {
    link->is_paused = 0;
    read_link(self, link);
}

/* Sending and receiving */

static void send_to_self(Worker *self, Link *link, Request *request, uint64_t tag) {
    Item *item = take_item(&link->posted, tag, NULL);
    Request *posted = item ? OF(Request, item, item) : NULL;
    char *place = NULL;
    Message *message = NULL;
    if (posted) {
        posted->ticket.num_bytes = request->left;
        if (request->left <= posted->capacity) place = posted->data;
    } else if ((message = new_message(self))) {
        message->tag = message->item.key = tag;
        message->num_bytes = message->received = request->left;
        place = message->data = message->memory = malloc(request->left + 1);
    }
    if (!posted && (!place || put_item(&link->kept, &message->item) < 0)) {
        if (message) free_message(self, message);
        snprintf(link->mute_words, WORDS_BYTES, "%s", NO_MEMORY);
        end(self, request, MUTE);
        return;
    }
    for (size_t i = 0; place && i < request->num_parts; i++)
        if (request->parts[i].iov_len) place = mempcpy(place, request->parts[i].iov_base, request->parts[i].iov_len);
    if (posted) end(self, posted, request->left <= posted->capacity ? OK : TOO_LONG);
    end(self, request, OK);
}

/* Queues the announcement of an offered message. Returns whether there was memory. */
static int offer(Worker *self, Link *link, Request *request, uint64_t tag, uint64_t inside) {
    link->room -= (int64_t)charge_of(OFFER, inside);
    request->is_offered = 1;
    request->item.key = request->number = ++link->num_offered;
    if (put_item(&link->offered, &request->item) < 0) {
        end(self, request, LOST);
        lose(self, link, "", NO_MEMORY);
        return 0;
    }
    head_frame(link, &request->frame, OFFER, tag, request->left, inside, request->number);
    return 1;
}

static void put_send(Worker *self, Link *link, Request *request, uint64_t tag) {
    if (link->descriptor < 0) {
        send_to_self(self, link, request, tag);
        return;
    }
    if (link->is_lost || link->is_mute) {
        end(self, request, link->is_lost ? LOST : MUTE);
        return;
    }
    uint64_t num_bytes = request->left;
    int64_t charge = (int64_t)num_bytes + ENTRY_BYTES;
    if (request->is_large && charge > link->room && charge <= KEEP_BYTES) {
        read_link(self, link); /* room may have come, which saves to be asked for the rest */
        if (link->is_lost) {
            end(self, request, LOST);
            return;
        }
    }
    int is_idle = !link->outgoing;
    request->frame.request = request;
    if (is_lendable(link, request)) {
        if (!offer(self, link, request, tag, request->num_parts == 2 ? request->parts[0].iov_len : 0)) return;
        head_lent(request);
    } else if (charge <= link->room) {
        link->room -= charge;
        head_frame(link, &request->frame, WHOLE, tag, num_bytes, num_bytes, 0);
    } else {
        int64_t inside = link->room - ENTRY_BYTES < OFFER_BYTES ? link->room - ENTRY_BYTES : OFFER_BYTES;
        if ((int64_t)num_bytes < inside) inside = (int64_t)num_bytes;
        inside = inside < 0 ? 0 : inside / LINE_BYTES * LINE_BYTES;
        if (!offer(self, link, request, tag, (uint64_t)inside)) return;
    }
    queue_last(link, &request->frame);
    if (is_idle) flush(self, link);
    if (link->is_paused && link->offered.count && !link->is_lost)
        resume(self, link); /* what the peer asks for comes behind what nobody asks for here */
}

static void put_receive(Worker *self, Link *link, Request *request, uint64_t tag) {
    Item *kept = take_item(&link->kept, tag, NULL);
    if (kept) {
        match(self, link, OF(Message, item, kept), request);
        if (link->is_paused && link->asked.count) resume(self, link); /* the rest comes behind what nobody asks for */
        return;
    }
    if (link->is_lost) {
        end(self, request, LOST);
        return;
    }
    request->item.key = tag;
    if (put_item(&link->posted, &request->item) < 0) {
        end(self, request, LOST);
        lose(self, link, "", NO_MEMORY);
        return;
    }
    heat(self, link);
    if (link->is_paused) resume(self, link);
}

#endif

/* Lending: who receives a large message copies it out of the memory of its sender, at once into its place.
 *
 * It is announced as an offered message whose header holds the address of what does not come with it. Who cannot read that
 * memory asks for the rest, as of any other, and is lent nothing any more. A sender that gives up says so in the lane before
 * it lets go of its memory: what was copied is a message only if it has not. Where it has died its socket has hung up, which
 * is looked at behind the copy as well, as its number may be that of another process by then. */

#ifndef BRAIDAX_TCP_LENDING_H
#define BRAIDAX_TCP_LENDING_H

#include <poll.h>
#include <sys/uio.h>

#include "tcp_link.h"

#define LENT_BYTES 20480             /* a larger message of a collective is lent, of others one that there is no room for */
#define LENT_INSIDE_BYTES 1024       /* at most of it go with its announcement: what stands before an array */
#define LENT_TURN_BYTES (1 << 22)    /* copied before others have their turn */
#define ADDRESS_PLACE 32             /* in a header */
#define CANNOT_BORROW 1              /* in the place of a length, of who asks for the rest */

static void put_first(Worker *self, Link *link, unsigned kind, uint32_t number, uint64_t num_bytes);
static void drop_or_finish(Worker *self, Message *message);

/* Finds out who is at the other end. */
static void expect_loans(Link *link) {
    struct ucred peer = {0, 0, 0};
    socklen_t size = sizeof peer;
    if (getsockopt(link->descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0) peer.pid = 0;
    link->process = peer.pid;
    link->lends = link->borrows = peer.pid > 0;
    link->last_lent = &link->lent;
}

/* Whether a message can be lent: all of it, or all but the first of two parts. */
static int is_lendable(const Link *link, const Request *request) {
    if (!link->lends || request->left <= LENT_BYTES) return 0;
    if (!request->ticket.run && (int64_t)request->left + ENTRY_BYTES <= link->room) return 0; /* its send ends at once */
    if (request->num_parts == 1) return 1;
    size_t inside = request->parts[0].iov_len;
    return request->num_parts == 2 && inside <= LENT_INSIDE_BYTES && (int64_t)charge_of(OFFER, inside) <= link->room;
}

static void head_lent(Request *request) {
    uint64_t address = (uint64_t)(uintptr_t)request->parts[request->num_parts - 1].iov_base;
    request->is_lent = 1;
    memcpy(request->frame.header + ADDRESS_PLACE, &address, sizeof address);
}

/* Puts a message that has its place, or is dropped, behind those that are copied before it. */
static void queue_lent(Link *link, Message *message) {
    message->next_lent = NULL;
    *link->last_lent = message;
    link->last_lent = &message->next_lent;
}

static int is_hung_up(const Link *link) {
    struct pollfd socket = {.fd = link->descriptor, .events = POLLRDHUP};
    return poll(&socket, 1, 0) < 0 || socket.revents & (POLLRDHUP | POLLHUP | POLLERR);
}

/* Whether the first message that is lent can be copied now. */
static int is_lent_here(const Link *link) { return link->lent && link->lent->received >= link->lent->lent_from; }

/* Copies the next bytes of a lent message. Returns whether that was something. */
static unsigned borrow(Worker *self, Link *link) {
    Message *message = link->lent;
    uint64_t left = message->num_bytes - message->lent_from - message->borrowed;
    if (message->data && left) {
        size_t most = left < LENT_TURN_BYTES ? (size_t)left : LENT_TURN_BYTES;
        struct iovec own = {message->data + message->lent_from + message->borrowed, most};
        struct iovec theirs = {(void *)(uintptr_t)(message->address + message->borrowed), most};
        ssize_t found = process_vm_readv(link->process, &own, 1, &theirs, 1, 0);
        if (found > 0) message->borrowed += (size_t)found;
        if (found > 0 && (size_t)found < left) return 1;
        if (found <= 0) link->borrows = 0;
    }
    if (!(link->lent = message->next_lent)) link->last_lent = &link->lent;
    uint32_t number = message->number;
    if (!link->borrows) {
        put_first(self, link, GO, number, CANNOT_BORROW);
    } else if (!is_withdrawn(&link->lanes) && !is_hung_up(link)) {
        take_item(&link->asked, message->item.key, &message->item);
        drop_or_finish(self, message);
        put_first(self, link, TAKEN, number, 0);
    } /* else it ends with the link */
    return 1;
}

#endif

/* A switch whose ports can be slow, far away, lossy or dead, for hosts that are network namespaces.
 *
 *     switch CONTROL PORTS
 *
 * runs in a network namespace of its own. It says "entered" when it has begun, and waits for a line: meanwhile the
 * caller makes interfaces port0, port1, ... there. Then it opens them, says "ready", and carries frames between them
 * until it is killed. CONTROL is a file with a struct control, in which the caller changes ports at any time, and reads
 * what was carried; network.py has the same struct.
 *
 * The kernel's own netem would do most of this, but many kernels are built without it.
 *
 * A frame may be larger than the MTU: where hosts leave cutting to the network card, the kernel passes on what the
 * card would cut (GSO), with a header that says how. Such a frame keeps that header, is carried whole or lost whole,
 * and takes as long as the frames that a card would make of it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PORTS = 8, SECOND_NS = 1000000000 };

#ifndef PACKET_IGNORE_OUTGOING /* since Linux 4.20 */
#define PACKET_IGNORE_OUTGOING 23
#endif

struct port {
    double rate;         /* bits per second, each way; 0: no limit */
    double loss;         /* the share of frames that are lost, each way */
    int64_t delay_ns;    /* of each frame, each way */
    int64_t jitter_ns;   /* up to so much more, by chance; frames keep their order */
    int64_t down;        /* not 0: the cable is out */
    int64_t mtu;         /* larger packets are lost, and nobody is told; 0: no limit */
    int64_t queue_bytes; /* what does not fit is lost; the queue is that of frames to this port */
    int64_t dropped;     /* counted by the switch: frames to this port that were lost */
};

struct control {
    struct port ports[PORTS];
    int64_t cut[PORTS][PORTS];     /* [from][to] not 0: no frame gets through */
    int64_t carried[PORTS][PORTS]; /* [from][to], counted by the switch: bytes on the wire of frames that arrived */
};

struct frame {
    struct frame *next;
    int64_t due_ns;
    int from;
    int wire_bytes;
    int length; /* with the GSO header */
    char data[];
};

/* Of one port, what only the switch knows. */
struct side {
    int socket;
    struct frame *first, *last; /* on the way to this port, in the order of arrival */
    int64_t queued_bytes;
    int64_t receives_until_ns, sends_until_ns; /* how long frames that are on their way keep the cable busy */
    int64_t last_due_ns;
};

/* Bytes that a frame takes on a cable beyond its own: checksum, preamble, gap. And headers of each one that is cut. */
enum { AROUND_FRAME = 24, TCP_HEADERS = 66, ETHERNET_HEADER = 14, LEAST_TCP_HEADERS = 54 };

static struct control *control;
static struct side sides[PORTS];
static int port_count;
static char received[1 << 17];

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * (int64_t)SECOND_NS + time.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* What a network card would make of a frame takes so many bytes on the cable. */
static int bytes_on_wire(const struct virtio_net_hdr *gso, int length) {
    int frames = gso->gso_type && gso->gso_size ? (length + gso->gso_size - 1) / gso->gso_size : 1;
    return length + (frames - 1) * TCP_HEADERS + frames * AROUND_FRAME;
}

static int too_large(const struct port *port, const struct virtio_net_hdr *gso, int length) {
    int largest = gso->gso_type ? gso->gso_size + LEAST_TCP_HEADERS : length;
    return port->mtu && largest > port->mtu + ETHERNET_HEADER;
}

static int is_lost(int from, int to, const struct virtio_net_hdr *gso, int length) {
    const struct port *a = &control->ports[from], *b = &control->ports[to];
    if (a->down || b->down || control->cut[from][to]) return 1;
    if (too_large(a, gso, length) || too_large(b, gso, length)) return 1;
    if (drand48() < a->loss + b->loss) return 1;
    return sides[to].queued_bytes + length > b->queue_bytes;
}

/* When the last bit of a frame that arrives now is through: it waits for frames before it at each of the two cables,
 * and goes on to the second one while it still arrives from the first. */
static int64_t through_ns(int from, int to, int wire_bytes) {
    double in = control->ports[from].rate, out = control->ports[to].rate, bits = 8.0 * wire_bytes;
    int64_t begins = larger(now_ns(), sides[from].sends_until_ns);
    sides[from].sends_until_ns = begins + (in > 0 ? (int64_t)(bits / in * SECOND_NS) : 0);
    int64_t goes_on = larger(begins, sides[to].receives_until_ns) + (out > 0 ? (int64_t)(bits / out * SECOND_NS) : 0);
    return sides[to].receives_until_ns = larger(goes_on, sides[from].sends_until_ns);
}

/* Put what was received, of so many bytes with the GSO header, into the queue to a port. */
static void enqueue(int from, int to, int bytes) {
    const struct virtio_net_hdr *gso = (const void *)received;
    int length = bytes - (int)sizeof *gso;
    if (is_lost(from, to, gso, length)) {
        control->ports[to].dropped++;
        return;
    }
    struct frame *frame = malloc(sizeof *frame + bytes);
    if (!frame) fail("malloc");
    memcpy(frame->data, received, bytes);
    frame->next = NULL, frame->from = from, frame->length = bytes, frame->wire_bytes = bytes_on_wire(gso, length);
    const struct port *a = &control->ports[from], *b = &control->ports[to];
    struct side *side = &sides[to];
    int64_t due = through_ns(from, to, frame->wire_bytes) + a->delay_ns + b->delay_ns;
    due += (int64_t)(drand48() * (a->jitter_ns + b->jitter_ns));
    frame->due_ns = side->last_due_ns = larger(due, side->last_due_ns);
    side->queued_bytes += length;
    if (side->last) side->last->next = frame;
    else side->first = frame;
    side->last = frame;
}

/* Hand over the first frame of a queue, unless the cable has been pulled meanwhile. */
static void deliver(int to) {
    struct side *side = &sides[to];
    struct frame *frame = side->first;
    int lost = control->ports[to].down || control->cut[frame->from][to];
    if (lost || write(side->socket, frame->data, frame->length) < 0) control->ports[to].dropped++;
    else control->carried[frame->from][to] += frame->wire_bytes;
    side->queued_bytes -= frame->length - (int)sizeof(struct virtio_net_hdr);
    side->first = frame->next;
    if (!side->first) side->last = NULL;
    free(frame);
}

/* Take some of what a port has for the switch. Hosts' addresses end in their number, from 1 on. */
static void receive(int from) {
    enum { AT_ONCE = 32 };
    for (int turn = 0; turn < AT_ONCE; turn++) {
        int bytes = read(sides[from].socket, received, sizeof received);
        const struct ether_header *ethernet = (const void *)(received + sizeof(struct virtio_net_hdr));
        if (bytes <= (int)(sizeof(struct virtio_net_hdr) + sizeof *ethernet)) return;
        int everybody = ethernet->ether_dhost[0] & 1, to = ethernet->ether_dhost[5] - 1;
        for (int port = 0; port < port_count; port++)
            if (port != from && (everybody || port == to)) enqueue(from, port, bytes);
    }
}

static int opened(int number) {
    char name[16];
    snprintf(name, sizeof name, "port%d", number);
    int on = 1, buffer = 64 << 20, result = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL));
    if (result < 0) fail("socket");
    if (setsockopt(result, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on)) fail("PACKET_VNET_HDR");
    if (setsockopt(result, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on)) fail("PACKET_IGNORE_OUTGOING");
    /* Only the queues above lose frames. */
    if (setsockopt(result, SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof buffer)) fail("SO_RCVBUFFORCE");
    if (setsockopt(result, SOL_SOCKET, SO_SNDBUFFORCE, &buffer, sizeof buffer)) fail("SO_SNDBUFFORCE");
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    address.sll_ifindex = (int)if_nametoindex(name);
    struct packet_mreq all = {.mr_ifindex = address.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
    if (bind(result, (struct sockaddr *)&address, sizeof address)) fail(name);
    if (setsockopt(result, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all)) fail("PACKET_ADD_MEMBERSHIP");
    return result;
}

/* Deliver what is due; when the next frame will be, or a moment later if there is none. */
static int64_t deliver_all(void) {
    int64_t now = now_ns(), next = now + SECOND_NS;
    for (int port = 0; port < port_count; port++) {
        while (sides[port].first && sides[port].first->due_ns <= now) deliver(port);
        if (sides[port].first && sides[port].first->due_ns < next) next = sides[port].first->due_ns;
    }
    return next;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    int file = open(arguments[1], O_RDWR);
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (control == MAP_FAILED) fail(arguments[1]);
    port_count = atoi(arguments[2]);
    puts("entered"), fflush(stdout);
    if (getchar() == EOF || port_count < 1 || port_count > PORTS) return 2;
    /* Before processes that compute: frames that wait for a core would be a slower network. */
    struct sched_param first = {.sched_priority = 10};
    if (sched_setscheduler(0, SCHED_FIFO, &first)) perror("SCHED_FIFO");
    struct pollfd waiting[PORTS];
    for (int port = 0; port < port_count; port++)
        waiting[port] = (struct pollfd){.fd = sides[port].socket = opened(port), .events = POLLIN};
    puts("ready"), fflush(stdout);
    for (;;) {
        int64_t wait = larger(deliver_all() - now_ns(), 0);
        struct timespec timeout = {wait / SECOND_NS, wait % SECOND_NS};
        if (ppoll(waiting, port_count, &timeout, NULL) <= 0) continue;
        for (int port = 0; port < port_count; port++)
            if (waiting[port].revents) receive(port);
    }
}

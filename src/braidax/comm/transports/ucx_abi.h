/* The part of UCX's interface that the binding uses, declared by ourselves: no header of UCX is needed to build.
 *
 * UCX keeps this interface stable within major version 1: structures grow at their ends only, and a mask says which
 * fields were set. Names are UCX's without the prefix of their constants' enumerations. */

#ifndef BRAIDAX_UCX_ABI_H
#define BRAIDAX_UCX_ABI_H

#include <stddef.h>
#include <stdint.h>

#define UCP_API_MAJOR 1
#define UCP_API_MINOR 11 /* the oldest that has all that is used here */

typedef int8_t ucs_status_t;
typedef void *ucs_status_ptr_t;

enum {
    UCS_OK = 0,
    UCS_INPROGRESS = 1,
    UCS_ERR_IO_ERROR = -3,
    UCS_ERR_UNREACHABLE = -6,
    UCS_ERR_MESSAGE_TRUNCATED = -9,
    UCS_ERR_CANCELED = -16,
    UCS_ERR_SHMEM_SEGMENT = -17,
    UCS_ERR_TIMED_OUT = -20,
    UCS_ERR_REJECTED = -23,
    UCS_ERR_NOT_CONNECTED = -24,
    UCS_ERR_CONNECTION_RESET = -25,
    UCS_ERR_FIRST_LINK_FAILURE = -40, /* and below it all failures of links and endpoints */
    UCS_ERR_LAST = -100,
};

static inline int is_error(ucs_status_ptr_t pointer) { return (uintptr_t)pointer >= (uintptr_t)(intptr_t)UCS_ERR_LAST; }
static inline ucs_status_t error_of(ucs_status_ptr_t pointer) { return (ucs_status_t)(intptr_t)pointer; }

/* What the death of a peer looks like, and nothing else. */
static inline int is_loss(ucs_status_t status) {
    switch (status) {
    case UCS_ERR_IO_ERROR:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_SHMEM_SEGMENT:
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_REJECTED:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_CONNECTION_RESET: return 1;
    default: return status <= UCS_ERR_FIRST_LINK_FAILURE;
    }
}

enum { UCP_FEATURE_TAG = 1 << 0, UCP_FEATURE_WAKEUP = 1 << 4 };
enum { UCP_PARAM_FIELD_FEATURES = 1 << 0, UCP_PARAM_FIELD_MT_WORKERS_SHARED = 1 << 5 };
enum { UCP_WORKER_PARAM_FIELD_THREAD_MODE = 1 << 0, UCS_THREAD_MODE_SERIALIZED = 1 };
enum {
    UCP_EP_PARAM_FIELD_REMOTE_ADDRESS = 1 << 0,
    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE = 1 << 1,
    UCP_EP_PARAM_FIELD_ERR_HANDLER = 1 << 2,
    UCP_ERR_HANDLING_MODE_PEER = 1,
};
enum { UCP_EP_ATTR_FIELD_TRANSPORTS = 1 << 3, UCP_EP_CLOSE_FLAG_FORCE = 1 << 0 };
enum { UCP_DATATYPE_CONTIG_BYTE = 1 << 3, UCP_DATATYPE_IOV = 2, UCS_MEMORY_TYPE_HOST = 0 };
enum {
    UCP_OP_ATTR_FIELD_CALLBACK = 1 << 1,
    UCP_OP_ATTR_FIELD_USER_DATA = 1 << 2,
    UCP_OP_ATTR_FIELD_DATATYPE = 1 << 3,
    UCP_OP_ATTR_FIELD_FLAGS = 1 << 4,
    UCP_OP_ATTR_FIELD_MEMORY_TYPE = 1 << 6,
    UCP_OP_ATTR_FLAG_NO_IMM_CMPL = 1 << 16,
    UCP_OP_ATTR_FLAG_FAST_CMPL = 1 << 17,
    UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL = 1 << 18,
};

typedef struct {
    uint64_t field_mask, features;
    size_t request_size;
    void (*request_init)(void *), (*request_cleanup)(void *);
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    uint64_t unused[8];
} ucp_params_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    uint64_t unused[32];
} ucp_worker_params_t;

typedef struct {
    uint64_t field_mask;
    const void *address;
    int err_mode;
    struct {
        void (*cb)(void *user_data, void *endpoint, ucs_status_t status);
        void *arg;
    } err_handler;
    uint64_t unused[16];
} ucp_ep_params_t;

typedef struct {
    const char *transport_name, *device_name;
} ucp_transport_entry_t;

typedef struct {
    uint64_t field_mask;
    char name[32];
    char local_address[128], remote_address[128]; /* struct sockaddr_storage */
    struct {
        ucp_transport_entry_t *entries;
        unsigned num_entries;
        size_t entry_size;
    } transports;
    uint64_t unused[8];
} ucp_ep_attr_t;

typedef struct {
    void *buffer;
    size_t length;
} ucp_dt_iov_t;

typedef struct {
    uint64_t sender_tag;
    size_t length;
} ucp_tag_recv_info_t;

typedef struct {
    uint32_t op_attr_mask, flags;
    void *request;
    union {
        void (*send)(void *request, ucs_status_t status, void *user_data);
        void (*recv)(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data);
    } cb;
    uint64_t datatype;
    void *user_data, *reply_buffer;
    int memory_type;
    uint64_t unused[8];
} ucp_request_param_t;

/* Every function that is used: result, name, parameters. */
#define UCX_FUNCTIONS(F)                                                                                     \
    F(const char *, ucs_status_string, (ucs_status_t))                                                       \
    F(void, ucp_get_version, (unsigned *, unsigned *, unsigned *))                                           \
    F(ucs_status_t, ucp_config_read, (const char *, const char *, void **))                                  \
    F(ucs_status_t, ucp_config_modify, (void *, const char *, const char *))                                 \
    F(void, ucp_config_release, (void *))                                                                    \
    F(ucs_status_t, ucp_init_version, (unsigned, unsigned, const ucp_params_t *, const void *, void **))     \
    F(void, ucp_cleanup, (void *))                                                                           \
    F(ucs_status_t, ucp_worker_create, (void *, const ucp_worker_params_t *, void **))                       \
    F(void, ucp_worker_destroy, (void *))                                                                    \
    F(ucs_status_t, ucp_worker_get_address, (void *, void **, size_t *))                                     \
    F(void, ucp_worker_release_address, (void *, void *))                                                    \
    F(ucs_status_t, ucp_worker_get_efd, (void *, int *))                                                     \
    F(ucs_status_t, ucp_worker_arm, (void *))                                                                \
    F(unsigned, ucp_worker_progress, (void *))                                                               \
    F(ucs_status_t, ucp_ep_create, (void *, const ucp_ep_params_t *, void **))                               \
    F(ucs_status_t, ucp_ep_query, (void *, ucp_ep_attr_t *))                                                 \
    F(ucs_status_ptr_t, ucp_ep_flush_nbx, (void *, const ucp_request_param_t *))                             \
    F(ucs_status_ptr_t, ucp_ep_close_nbx, (void *, const ucp_request_param_t *))                             \
    F(ucs_status_ptr_t, ucp_tag_send_nbx, (void *, const void *, size_t, uint64_t, const ucp_request_param_t *)) \
    F(ucs_status_ptr_t, ucp_tag_recv_nbx, (void *, void *, size_t, uint64_t, uint64_t, const ucp_request_param_t *)) \
    F(void *, ucp_tag_probe_nb, (void *, uint64_t, uint64_t, int, ucp_tag_recv_info_t *))                    \
    F(void, ucp_request_cancel, (void *, void *))                                                            \
    F(ucs_status_t, ucp_request_check_status, (void *))                                                      \
    F(void, ucp_request_free, (void *))

#endif

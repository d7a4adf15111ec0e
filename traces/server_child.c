/* The HDF5 side of the server: nothing here may be trusted by the other side. */
#include "common/base/child.h"
#include "traces/server_wire.h"

#include <hdf5.h>
#include <stdio.h>
#include <string.h>

enum { SWMR_ATTEMPTS = 24 };

typedef struct child {
    uint8_t *slots;
    hid_t file;
    hid_t dataset[MZ_COLUMNS]; /* open ones, else -1 */
    int dims[MZ_COLUMNS];
} child;

/* Keeps the innermost message of HDF5's error stack: the one nearest to the cause. */
static herr_t keep_first(unsigned n, const H5E_error2_t *error, void *text) {
    if (n == 0 && error->desc)
        snprintf(text, 160, "%s", error->desc);
    return 0;
}

static void fail(mz_wire_reply *reply, const char *what) {
    char cause[160] = "no reason given";
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_first, cause);
    reply->failed = 1;
    snprintf(reply->text, sizeof reply->text, "%s (%s)", what, cause);
}

static void open_file(child *c, const char *path, mz_wire_reply *reply) {
    if (H5Fis_hdf5(path) <= 0) {
        reply->failed = 1;
        snprintf(reply->text, sizeof reply->text, "not an HDF5 file");
        return;
    }
    /* A recorder that still runs, or was killed, leaves the mark of a single writer. */
    c->file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (c->file < 0) {
        /* A torn read is tried again, each time after twice the pause, from 1 ns on: the library's
         * own 100 attempts would take ages over a damaged file. */
        hid_t access = H5Pcreate(H5P_FILE_ACCESS);
        H5Pset_metadata_read_attempts(access, SWMR_ATTEMPTS);
        c->file = H5Fopen(path, H5F_ACC_RDONLY | H5F_ACC_SWMR_READ, access);
        H5Pclose(access);
    }
    if (c->file < 0)
        fail(reply, "HDF5 cannot open this file: it is damaged or cut short");
}

static bool is_hard_link(child *c, const char *path) {
    H5L_info_t info;
    return H5Lexists(c->file, path, H5P_DEFAULT) > 0 &&
           H5Lget_info(c->file, path, &info, H5P_DEFAULT) >= 0 && info.type == H5L_TYPE_HARD;
}

/* Links to other files are not followed: a trace is one file. */
static hid_t open_object(child *c, const char *group, const char *name) {
    char path[160];
    if (strcmp(group, "/") != 0 && !is_hard_link(c, group))
        return -1;
    snprintf(path, sizeof path, "%s%s%s", strcmp(group, "/") == 0 ? "" : group, *name ? "/" : "",
             name);
    if (!path[0])
        return H5Gopen2(c->file, "/", H5P_DEFAULT);
    return *name && !is_hard_link(c, path) ? -1 : H5Oopen(c->file, path, H5P_DEFAULT);
}

/* Longer texts are cut; what is cut is longer than any fact may be, so the reader refuses it. */
static void keep_text(mz_attr *out, const char *text) {
    size_t n = strnlen(text, sizeof out->text - 1);
    memcpy(out->text, text, n);
    out->text[n] = 0;
    out->kind = MZ_ATTR_TEXT;
}

static void read_text(hid_t attr, hid_t type, mz_attr *out) {
    if (H5Tis_variable_str(type) > 0) {
        char *text = NULL;
        if (H5Aread(attr, type, &text) >= 0 && text)
            keep_text(out, text);
        H5free_memory(text);
        return;
    }
    char text[4096] = {0};
    size_t size = H5Tget_size(type);
    if (size >= sizeof text || H5Aread(attr, type, text) < 0)
        return;
    if (H5Tget_strpad(type) == H5T_STR_SPACEPAD)
        while (size > 0 && text[size - 1] == ' ')
            text[--size] = 0;
    keep_text(out, text);
}

/* h5py stores a Python bool as an enumeration of bytes. */
static void read_enum(hid_t attr, hid_t type, mz_attr *out) {
    int8_t value = 0;
    if (H5Tget_size(type) == 1 && H5Aread(attr, type, &value) >= 0) {
        out->kind = MZ_ATTR_INT;
        out->integer = value;
    }
}

static void read_attr(child *c, const mz_wire_request *request, mz_attr *out) {
    hid_t object = open_object(c, request->group, "");
    hid_t attr = -1, type = -1, space = -1;
    if (object >= 0 && H5Aexists(object, request->name) > 0)
        attr = H5Aopen(object, request->name, H5P_DEFAULT);
    if (attr >= 0) {
        out->kind = MZ_ATTR_OTHER;
        type = H5Aget_type(attr);
        space = H5Aget_space(attr);
    }
    if (type >= 0 && space >= 0 && H5Sget_simple_extent_npoints(space) == 1) {
        switch (H5Tget_class(type)) {
        case H5T_INTEGER:
            if (H5Aread(attr, H5T_NATIVE_INT64, &out->integer) >= 0)
                out->kind = MZ_ATTR_INT;
            break;
        case H5T_FLOAT:
            if (H5Aread(attr, H5T_NATIVE_DOUBLE, &out->real) >= 0)
                out->kind = MZ_ATTR_REAL;
            break;
        case H5T_STRING:
            read_text(attr, type, out);
            break;
        case H5T_ENUM:
            read_enum(attr, type, out);
            break;
        default:
            break;
        }
    }
    H5Sclose(space);
    H5Tclose(type);
    H5Aclose(attr);
    H5Oclose(object);
}

static bool is_half(hid_t type) {
    size_t sign = 0, exponent = 0, exponent_size = 0, mantissa = 0, mantissa_size = 0;
    return H5Tget_size(type) == 2 && H5Tget_order(type) == H5T_ORDER_LE &&
           H5Tget_fields(type, &sign, &exponent, &exponent_size, &mantissa, &mantissa_size) >= 0 &&
           sign == 15 && exponent == 10 && exponent_size == 5 && mantissa == 0 &&
           mantissa_size == 10 && H5Tget_ebias(type) == 15;
}

static mz_elem elem_of(hid_t type) {
    const struct {
        hid_t type;
        mz_elem elem;
    } known[] = {{H5T_STD_U8LE, MZ_ELEM_U8},    {H5T_STD_U16LE, MZ_ELEM_U16},
                 {H5T_STD_U32LE, MZ_ELEM_U32},  {H5T_STD_U64LE, MZ_ELEM_U64},
                 {H5T_STD_I8LE, MZ_ELEM_I8},    {H5T_STD_I16LE, MZ_ELEM_I16},
                 {H5T_STD_I32LE, MZ_ELEM_I32},  {H5T_STD_I64LE, MZ_ELEM_I64},
                 {H5T_IEEE_F32LE, MZ_ELEM_F32}, {H5T_IEEE_F64LE, MZ_ELEM_F64}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (H5Tequal(type, known[i].type) > 0)
            return known[i].elem;
    return H5Tget_class(type) == H5T_FLOAT && is_half(type) ? MZ_ELEM_F16 : MZ_ELEM_OTHER;
}

static void describe_other(hid_t type, mz_dataset *out) {
    static const char *const names[] = {"integer",   "float",           "time",   "string",
                                        "bit field", "opaque",          "record", "reference",
                                        "enum",      "variable length", "array"};
    int class = (int)H5Tget_class(type);
    bool known = class >= 0 && class < (int)(sizeof names / sizeof names[0]);
    snprintf(out->other_type, sizeof out->other_type, "%s of %zu bytes%s",
             known ? names[class] : "unknown", H5Tget_size(type),
             H5Tget_order(type) == H5T_ORDER_BE ? ", big-endian" : "");
}

static void describe_layout(hid_t plist, mz_dataset *out) {
    unsigned flags = 0;
    hsize_t chunk[MZ_SERVER_DIMS] = {0};
    out->chunked = H5Pget_layout(plist) == H5D_CHUNKED &&
                   H5Pget_chunk(plist, MZ_SERVER_DIMS, chunk) == out->dims;
    for (int i = 0; i < MZ_SERVER_DIMS; i++)
        out->chunk[i] = chunk[i] > INT64_MAX ? -1 : (int64_t)chunk[i];
    out->whole_edges =
        H5Pget_chunk_opts(plist, &flags) >= 0 && !(flags & H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS);
    out->filters = H5Pget_nfilters(plist);
    for (int i = 0; i < out->filters && i < MZ_SERVER_FILTERS; i++) {
        size_t values = 0;
        unsigned filter_flags = 0;
        out->filter[i] = (int32_t)H5Pget_filter2(plist, (unsigned)i, &filter_flags, &values, NULL,
                                                 0, NULL, NULL);
    }
}

static void describe(child *c, const mz_wire_request *request, mz_dataset *out) {
    const mz_column *column = &mz_columns[request->column];
    hid_t *dataset = &c->dataset[request->column];
    if (*dataset < 0)
        *dataset = open_object(c, column->group, column->name);
    if (*dataset < 0)
        return;
    out->exists = true;
    if (H5Iget_type(*dataset) != H5I_DATASET) {
        snprintf(out->other_type, sizeof out->other_type, "a group");
        return;
    }
    hid_t type = H5Dget_type(*dataset), space = H5Dget_space(*dataset);
    hid_t plist = H5Dget_create_plist(*dataset);
    hsize_t dim[MZ_SERVER_DIMS] = {0};
    out->elem = elem_of(type);
    describe_other(type, out);
    out->dims = H5Sget_simple_extent_ndims(space);
    if (out->dims > 0 && out->dims <= MZ_SERVER_DIMS) {
        H5Sget_simple_extent_dims(space, dim, NULL);
        describe_layout(plist, out);
        c->dims[request->column] = out->dims;
    }
    for (int i = 0; i < MZ_SERVER_DIMS; i++)
        out->dim[i] = dim[i] > INT64_MAX ? -1 : (int64_t)dim[i];
    hsize_t stored = H5Dget_storage_size(*dataset);
    out->stored = stored > INT64_MAX ? INT64_MAX : (int64_t)stored;
    H5Pclose(plist);
    H5Sclose(space);
    H5Tclose(type);
}

static void read_chunk(child *c, const mz_wire_request *request, mz_wire_reply *reply) {
    hid_t dataset = c->dataset[request->column];
    hsize_t offset[MZ_SERVER_DIMS] = {(hsize_t)request->row, 0}, size = 0;
    if (dataset < 0 || H5Dget_chunk_storage_size(dataset, offset, &size) < 0) {
        fail(reply, "HDF5 cannot find the chunk");
        return;
    }
    if (size > mz_wire_slot_size()) {
        reply->failed = 1;
        snprintf(reply->text, sizeof reply->text, "a chunk claims to take %llu bytes in the file",
                 (unsigned long long)size);
        return;
    }
    uint32_t mask = 0;
    uint8_t *slot = c->slots + (size_t)request->column * mz_wire_slot_size();
    if (size > 0 && H5Dread_chunk(dataset, H5P_DEFAULT, offset, &mask, slot) < 0) {
        fail(reply, "HDF5 cannot read the chunk");
        return;
    }
    reply->size = (int64_t)size;
    reply->mask = mask;
}

static void answer(child *c, const mz_wire_request *request, const char *path,
                   mz_wire_reply *reply) {
    reply->op = request->op;
    reply->column = request->column;
    reply->row = request->row;
    switch (request->op) {
    case MZ_WIRE_OPEN:
        open_file(c, path, reply);
        break;
    case MZ_WIRE_ATTR:
        read_attr(c, request, &reply->attr);
        break;
    case MZ_WIRE_DATASET:
        describe(c, request, &reply->dataset);
        break;
    default:
        read_chunk(c, request, reply);
    }
}

void mz_server_child(int fd, uint8_t *slots, const char *path) {
    child c = {.slots = slots, .file = -1};
    for (int i = 0; i < MZ_COLUMNS; i++)
        c.dataset[i] = -1;
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    mz_wire_request request;
    mz_wire_reply reply;
    do {
        if (!mz_parent_receive(fd, &request, sizeof request))
            return;
        memset(&reply, 0, sizeof reply);
        answer(&c, &request, path, &reply);
    } while (mz_parent_send(fd, &reply, sizeof reply));
}

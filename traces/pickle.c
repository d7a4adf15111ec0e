#include "traces/pickle.h"

#include "traces/zip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a pickle may name. */
typedef enum global_code {
    REBUILD_TENSOR,
    STORAGE_CLASS,
    ORDERED_DICT,
    NP_RECONSTRUCT,
    NP_ARRAY,
    NP_DTYPE,
    NP_SCALAR,
    ENCODE,
    /* made on the way: */
    STORAGE,
    DTYPE
} global_code;

typedef struct global {
    const char *module, *name;
    global_code code;
    char kind; /* of a storage class; 'b' is bfloat16 */
    int size;
} global;

static const global globals[] = {
    {"torch._utils", "_rebuild_tensor_v2", REBUILD_TENSOR, 0, 0},
    {"torch", "ByteStorage", STORAGE_CLASS, 'u', 1},
    {"torch", "BoolStorage", STORAGE_CLASS, 'u', 1},
    {"torch", "CharStorage", STORAGE_CLASS, 'i', 1},
    {"torch", "ShortStorage", STORAGE_CLASS, 'i', 2},
    {"torch", "IntStorage", STORAGE_CLASS, 'i', 4},
    {"torch", "LongStorage", STORAGE_CLASS, 'i', 8},
    {"torch", "HalfStorage", STORAGE_CLASS, 'f', 2},
    {"torch", "BFloat16Storage", STORAGE_CLASS, 'b', 2},
    {"torch", "FloatStorage", STORAGE_CLASS, 'f', 4},
    {"torch", "DoubleStorage", STORAGE_CLASS, 'f', 8},
    {"collections", "OrderedDict", ORDERED_DICT, 0, 0},
    {"numpy.core.multiarray", "_reconstruct", NP_RECONSTRUCT, 0, 0},
    {"numpy._core.multiarray", "_reconstruct", NP_RECONSTRUCT, 0, 0},
    {"numpy.core.multiarray", "scalar", NP_SCALAR, 0, 0},
    {"numpy._core.multiarray", "scalar", NP_SCALAR, 0, 0},
    {"numpy", "ndarray", NP_ARRAY, 0, 0},
    {"numpy", "dtype", NP_DTYPE, 0, 0},
    {"_codecs", "encode", ENCODE, 0, 0},
};

typedef struct storage {
    char kind;
    int size;
    int64_t offset, elements;
} storage;

typedef struct machine {
    const mz_datafile *file;
    const unsigned char *begin, *p, *end;
    mz_storage_place place;
    void *context;
    mz_arena *arena;
    mz_value **stack, **memo;
    size_t depth, stack_room, memos, memo_room;
    size_t *mark;
    size_t marks, mark_room;
    mz_err *err;
} machine;

static mz_code bad(machine *m, const char *why) {
    return mz_fail(m->err, MZ_EINPUT, "%s: pickle byte %lld: %s", mz_datafile_path(m->file),
                   (long long)(m->p - m->begin), why);
}

static mz_code full(machine *m) {
    return mz_fail_nomem(m->err, "the values of a pickle");
}

/* ---- values ---------------------------------------------------------------------------------- */

static void *allot(machine *m, size_t bytes) {
    size_t held = m->arena->total + (m->stack_room + m->memo_room + m->mark_room) * sizeof(void *);
    if (held > MZ_PICKLE_MEMORY || bytes > MZ_PICKLE_MEMORY - held) {
        bad(m, "the values need more than 2 GiB");
        return NULL;
    }
    void *memory = mz_arena_alloc(m->arena, bytes ? bytes : 1, 1);
    if (!memory)
        full(m);
    return memory;
}

static mz_code push(machine *m, mz_value *value) {
    if (m->depth > MZ_PICKLE_MEMORY / 64)
        return bad(m, "too many values at once");
    if (!mz_grow((void **)&m->stack, &m->stack_room, m->depth + 1, sizeof *m->stack))
        return full(m);
    m->stack[m->depth++] = value;
    return MZ_OK;
}

static mz_value *new_value(machine *m, mz_value_type type) {
    mz_value *value = allot(m, sizeof *value);
    if (value)
        value->type = type;
    return value;
}

/* Pushes a new value; the caller fills it in. NULL: m->err says why. */
static mz_value *push_new(machine *m, mz_value_type type) {
    mz_value *value = new_value(m, type);
    return value && push(m, value) == MZ_OK ? value : NULL;
}

static mz_code push_int(machine *m, int64_t whole) {
    mz_value *value = push_new(m, MZ_VALUE_INT);
    if (!value)
        return m->err->code;
    value->whole = whole;
    return MZ_OK;
}

static mz_code push_bytes(machine *m, mz_value_type type, uint64_t length) {
    if (length > (uint64_t)(m->end - m->p) || length > UINT32_MAX - 1)
        return bad(m, "a text reaches beyond the end");
    char *copy = allot(m, (size_t)length + 1);
    mz_value *value = copy ? push_new(m, type) : NULL;
    if (!value)
        return m->err->code;
    memcpy(copy, m->p, (size_t)length);
    value->text = copy;
    value->count = (uint32_t)length;
    m->p += length;
    return MZ_OK;
}

/* The top of the stack above the last mark, or NULL. */
static mz_value *pop(machine *m) {
    size_t floor = m->marks ? m->mark[m->marks - 1] : 0;
    if (m->depth <= floor) {
        bad(m, "a value is missing");
        return NULL;
    }
    return m->stack[--m->depth];
}

static mz_code append(machine *m, mz_value *list, mz_value *const *items, size_t count) {
    if (count > UINT32_MAX / 4 - list->count)
        return bad(m, "a list is too long");
    if (list->count + count > list->room) {
        uint32_t room = list->count + (uint32_t)count;
        room = room < 2 * list->room ? 2 * list->room : room;
        mz_value **grown = allot(m, room * sizeof *grown);
        if (!grown)
            return m->err->code;
        if (list->count)
            memcpy(grown, list->item, list->count * sizeof *grown);
        list->item = grown;
        list->room = room;
    }
    if (count)
        memcpy(list->item + list->count, items, count * sizeof *items);
    list->count += (uint32_t)count;
    return MZ_OK;
}

/* Items above the last mark go to the container below it. */
static mz_code append_marked(machine *m, mz_value_type type) {
    if (m->marks == 0)
        return bad(m, "a mark is missing");
    size_t first = m->mark[--m->marks], count = m->depth - first;
    size_t floor = m->marks ? m->mark[m->marks - 1] : 0;
    if (first <= floor || m->stack[first - 1]->type != type || (type == MZ_VALUE_DICT && count % 2))
        return bad(m, "items without a container");
    m->depth = first;
    return append(m, m->stack[first - 1], m->stack + first, count);
}

static mz_code append_top(machine *m, mz_value_type type, size_t count) {
    size_t floor = m->marks ? m->mark[m->marks - 1] : 0;
    if (m->depth - floor < count + 1 || m->stack[m->depth - count - 1]->type != type)
        return bad(m, "items without a container");
    m->depth -= count;
    return append(m, m->stack[m->depth - 1], m->stack + m->depth, count);
}

static mz_code push_tuple(machine *m, size_t count) {
    size_t floor = m->marks ? m->mark[m->marks - 1] : 0;
    if (m->depth - floor < count)
        return bad(m, "a value is missing");
    mz_value *tuple = new_value(m, MZ_VALUE_LIST);
    if (!tuple || append(m, tuple, m->stack + m->depth - count, count))
        return m->err->code;
    m->depth -= count;
    return push(m, tuple);
}

/* ---- classes and functions ------------------------------------------------------------------- */

static mz_code push_global(machine *m, const char *module, const char *name) {
    for (size_t i = 0; i < sizeof globals / sizeof globals[0]; i++)
        if (strcmp(globals[i].module, module) == 0 && strcmp(globals[i].name, name) == 0) {
            mz_value *value = push_new(m, MZ_VALUE_OTHER);
            if (!value)
                return m->err->code;
            value->count = globals[i].code;
            value->other = &globals[i];
            return MZ_OK;
        }
    return mz_fail(m->err, MZ_EINPUT,
                   "%s: the pickle names %.80s.%.80s; only tensors, NumPy arrays, dict, list, "
                   "tuple, text and numbers are read",
                   mz_datafile_path(m->file), module, name);
}

/* A line of the old text form, up to its newline; NULL: none. */
static const char *line(machine *m) {
    const unsigned char *newline = memchr(m->p, '\n', (size_t)(m->end - m->p));
    if (!newline) {
        bad(m, "a name reaches beyond the end");
        return NULL;
    }
    size_t length = (size_t)(newline - m->p);
    char *copy = allot(m, length + 1);
    if (copy)
        memcpy(copy, m->p, length);
    m->p = newline + 1;
    return copy;
}

static mz_code named_global(machine *m) {
    const char *module = line(m), *name = module ? line(m) : NULL;
    return name ? push_global(m, module, name) : m->err->code;
}

static mz_code stacked_global(machine *m) {
    mz_value *name = pop(m), *module = name ? pop(m) : NULL;
    if (!module)
        return m->err->code;
    if (name->type != MZ_VALUE_TEXT || module->type != MZ_VALUE_TEXT)
        return bad(m, "a global without a name");
    return push_global(m, module->text, name->text);
}

static bool is_code(const mz_value *value, global_code code) {
    return value->type == MZ_VALUE_OTHER && value->count == (uint32_t)code;
}

/* ("storage", class, key, location, elements) */
static mz_code push_storage(machine *m) {
    mz_value *id = pop(m);
    int64_t elements;
    if (!id)
        return m->err->code;
    if (id->type != MZ_VALUE_LIST || id->count < 5 || id->item[0]->type != MZ_VALUE_TEXT ||
        strcmp(id->item[0]->text, "storage") != 0 || !is_code(id->item[1], STORAGE_CLASS) ||
        id->item[2]->type != MZ_VALUE_TEXT || !mz_value_int(id->item[4], &elements))
        return bad(m, "a persistent id that is no storage");
    const global *class = id->item[1]->other;
    if (!m->place)
        return bad(m, "a storage in a file that has none");
    if (elements < 0 || elements > INT64_MAX / 16)
        return bad(m, "a storage of an impossible size");
    storage *held = allot(m, sizeof *held);
    mz_value *value = held ? push_new(m, MZ_VALUE_OTHER) : NULL;
    if (!value)
        return m->err->code;
    *held = (storage){.kind = class->kind, .size = class->size, .elements = elements};
    value->count = STORAGE;
    value->other = held;
    return m->place(m->context, id->item[2]->text, elements * class->size, &held->offset, m->err);
}

static bool read_extents(const mz_value *list, int64_t *extent) {
    if (list->type != MZ_VALUE_LIST || list->count > MZ_NPY_DIMS)
        return false;
    for (uint32_t i = 0; i < list->count; i++)
        if (!mz_value_int(list->item[i], &extent[i]) || extent[i] < 0)
            return false;
    return true;
}

/* Turns `value` into the tensor; what lies outside its storage is refused. */
static mz_code become_tensor(machine *m, mz_value *value, const mz_tensor *tensor,
                             const char *what) {
    mz_tensor *copy = allot(m, sizeof *copy);
    if (!copy)
        return m->err->code;
    *copy = *tensor;
    value->type = MZ_VALUE_TENSOR;
    value->tensor = copy;
    value->count = value->room = 0;
    return mz_tensor_check(m->file, copy, what, m->err);
}

/* _rebuild_tensor_v2(storage, first element, size, stride, requires_grad, hooks) */
static mz_code rebuild_tensor(machine *m, const mz_value *args, mz_value *value) {
    int64_t first, stride[MZ_NPY_DIMS];
    mz_tensor tensor = {0};
    if (args->count < 4 || !is_code(args->item[0], STORAGE) ||
        !mz_value_int(args->item[1], &first) || first < 0 ||
        !read_extents(args->item[2], tensor.shape.extent) || !read_extents(args->item[3], stride) ||
        args->item[2]->count != args->item[3]->count)
        return bad(m, "a tensor that is not built as usual (or has more than 8 dimensions)");
    const storage *held = args->item[0]->other;
    tensor.shape.dims = (int)args->item[2]->count;
    tensor.shape.kind = held->kind;
    tensor.shape.size = held->size;
    /* An expanded view may stand for any number of elements: it would break bounds on memory. */
    if (!mz_tensor_contiguous(&tensor) || first > held->elements ||
        tensor.shape.elements > held->elements)
        return bad(m, "a tensor larger than its storage");
    memcpy(tensor.stride, stride, sizeof stride);
    tensor.offset = held->offset + first * held->size;
    int64_t last = 0;
    for (int d = 0; d < tensor.shape.dims && tensor.shape.elements; d++) {
        int64_t steps = tensor.shape.extent[d] - 1;
        if (steps && stride[d] > (held->elements - last) / steps)
            return bad(m, "a tensor larger than its storage");
        last += steps * stride[d];
    }
    if (tensor.shape.elements && last >= held->elements - first)
        return bad(m, "a tensor larger than its storage");
    return become_tensor(m, value, &tensor, "a tensor");
}

/* numpy.dtype("i4", False, True) */
static mz_code make_dtype(machine *m, const mz_value *args, mz_value *value) {
    if (args->count < 1 || args->item[0]->type != MZ_VALUE_TEXT)
        return bad(m, "a NumPy type without a name");
    const char *name = args->item[0]->text;
    char kind = name[0] == 'b' ? 'u' : name[0];
    int size = kind ? atoi(name + 1) : 0;
    bool known =
        ((kind == 'u' || kind == 'i') && (size == 1 || size == 2 || size == 4 || size == 8)) ||
        (kind == 'f' && (size == 2 || size == 4 || size == 8));
    if (!known)
        return mz_fail(m->err, MZ_EINPUT,
                       "%s: a NumPy array of type %.20s is not read; only whole numbers and floats "
                       "are",
                       mz_datafile_path(m->file), name);
    storage *type = allot(m, sizeof *type);
    if (!type)
        return m->err->code;
    *type = (storage){.kind = kind, .size = size};
    value->count = DTYPE;
    value->other = type;
    return MZ_OK;
}

/* numpy.core.multiarray.scalar(dtype, bytes): an array without axes. */
static mz_code make_scalar(machine *m, const mz_value *args, mz_value *value) {
    if (args->count != 2 || !is_code(args->item[0], DTYPE) || args->item[1]->type != MZ_VALUE_BYTES)
        return bad(m, "a NumPy scalar that is not built as usual");
    const storage *type = args->item[0]->other;
    mz_tensor tensor = {.shape = {.kind = type->kind, .size = type->size},
                        .data = (const unsigned char *)args->item[1]->text,
                        .data_bytes = args->item[1]->count};
    mz_tensor_contiguous(&tensor);
    return become_tensor(m, value, &tensor, "a NumPy scalar");
}

/* _codecs.encode(text, "latin1"): how protocol 2 writes bytes. */
static mz_code encode(machine *m, const mz_value *args, mz_value *value) {
    if (args->count != 2 || args->item[0]->type != MZ_VALUE_TEXT ||
        args->item[1]->type != MZ_VALUE_TEXT || strcmp(args->item[1]->text, "latin1") != 0)
        return bad(m, "bytes that are not written as latin1 text");
    const unsigned char *text = (const unsigned char *)args->item[0]->text;
    uint32_t length = args->item[0]->count, n = 0;
    unsigned char *out = allot(m, length + (size_t)1);
    if (!out)
        return m->err->code;
    for (uint32_t i = 0; i < length; i++) {
        if (text[i] < 0x80) {
            out[n++] = text[i];
            continue;
        }
        if ((text[i] & 0xfe) != 0xc2 || i + 1 == length || (text[i + 1] & 0xc0) != 0x80)
            return bad(m, "bytes that are not latin1 text");
        out[n++] = (unsigned char)((text[i] & 3) << 6 | (text[i + 1] & 0x3f));
        i++;
    }
    value->type = MZ_VALUE_BYTES;
    value->text = (const char *)out;
    value->count = n;
    return MZ_OK;
}

static mz_code reduce(machine *m) {
    mz_value *args = pop(m), *callable = args ? pop(m) : NULL;
    if (!callable)
        return m->err->code;
    if (callable->type != MZ_VALUE_OTHER || args->type != MZ_VALUE_LIST)
        return bad(m, "a call of something that is no function");
    mz_value *value = push_new(m, MZ_VALUE_OTHER);
    if (!value)
        return m->err->code;
    switch ((global_code)callable->count) {
    case REBUILD_TENSOR:
        return rebuild_tensor(m, args, value);
    case ORDERED_DICT:
        value->type = MZ_VALUE_DICT;
        return args->count == 0 ? MZ_OK : bad(m, "an OrderedDict made from something");
    case NP_RECONSTRUCT:
        value->count = NP_ARRAY;
        return args->count > 0 && is_code(args->item[0], NP_ARRAY)
                   ? MZ_OK
                   : bad(m, "a NumPy array of another class");
    case NP_DTYPE:
        return make_dtype(m, args, value);
    case NP_SCALAR:
        return make_scalar(m, args, value);
    case ENCODE:
        return encode(m, args, value);
    default:
        return bad(m, "a call of something that is no function");
    }
}

/* State of an array: (version, shape, dtype, Fortran order, bytes). */
static mz_code fill_array(machine *m, const mz_value *state, mz_value *value) {
    mz_tensor tensor = {0};
    if (state->count != 5 || !read_extents(state->item[1], tensor.shape.extent) ||
        !is_code(state->item[2], DTYPE) || state->item[4]->type != MZ_VALUE_BYTES)
        return bad(m, "a NumPy array that is not built as usual");
    if (state->item[3]->type != MZ_VALUE_BOOL || state->item[3]->whole)
        return bad(m, "a NumPy array in Fortran order; save numpy.ascontiguousarray(array)");
    const storage *type = state->item[2]->other;
    tensor.shape.dims = (int)state->item[1]->count;
    tensor.shape.kind = type->kind;
    tensor.shape.size = type->size;
    tensor.data = (const unsigned char *)state->item[4]->text;
    tensor.data_bytes = state->item[4]->count;
    if (!mz_tensor_contiguous(&tensor))
        return bad(m, "a NumPy array of an impossible size");
    return become_tensor(m, value, &tensor, "a NumPy array");
}

static mz_code build(machine *m) {
    mz_value *state = pop(m), *value = state ? pop(m) : NULL;
    if (!value)
        return m->err->code;
    mz_code code;
    if (is_code(value, NP_ARRAY) && state->type == MZ_VALUE_LIST) {
        code = fill_array(m, state, value);
    } else if (is_code(value, DTYPE) && state->type == MZ_VALUE_LIST && state->count > 1 &&
               state->item[1]->type == MZ_VALUE_TEXT) {
        char order = state->item[1]->text[0];
        code = order == '<' || order == '|' ? MZ_OK : bad(m, "a big-endian NumPy array");
    } else {
        code = bad(m, "an object with a state of its own");
    }
    return code ? code : push(m, value);
}

/* ---- the machine ----------------------------------------------------------------------------- */

/* An unsigned little-endian operand of `bytes` bytes. */
static mz_code operand(machine *m, int bytes, uint64_t *value) {
    *value = 0;
    if (m->end - m->p < bytes)
        return bad(m, "the pickle ends within an operation");
    for (int i = bytes - 1; i >= 0; i--)
        *value = *value << 8 | m->p[i];
    m->p += bytes;
    return MZ_OK;
}

static mz_code push_number(machine *m, unsigned char op) {
    uint64_t raw = 0;
    mz_code code;
    if (op == 'G') {
        code = operand(m, 8, &raw);
        mz_value *value = code ? NULL : push_new(m, MZ_VALUE_REAL);
        if (!value)
            return m->err->code;
        raw = __builtin_bswap64(raw);
        memcpy(&value->real, &raw, sizeof raw);
        return MZ_OK;
    }
    int bytes = op == 'K' ? 1 : op == 'M' ? 2 : 4;
    if (op == 0x8a) {
        uint64_t length = 0;
        code = operand(m, 1, &length);
        if (code)
            return code;
        if (length > 8)
            return bad(m, "a whole number beyond 64 bits");
        bytes = (int)length;
    }
    code = operand(m, bytes, &raw);
    if (code)
        return code;
    bool has_sign = op == 'J' || op == 0x8a;
    if (has_sign && bytes > 0 && bytes < 8 && raw >> (8 * bytes - 1))
        raw |= UINT64_MAX << (8 * bytes);
    return push_int(m, (int64_t)raw);
}

static mz_code remember(machine *m, uint64_t index) {
    /* Picklers number what they remember one after another, two bytes or more each. */
    if (index > (uint64_t)(m->p - m->begin) / 2)
        return bad(m, "a memory beyond the size of the pickle");
    if (m->depth == 0)
        return bad(m, "a value is missing");
    size_t had = m->memo_room;
    if (!mz_grow((void **)&m->memo, &m->memo_room, (size_t)index + 1, sizeof *m->memo))
        return full(m);
    memset(m->memo + had, 0, (m->memo_room - had) * sizeof *m->memo);
    m->memo[index] = m->stack[m->depth - 1];
    if (index >= m->memos)
        m->memos = (size_t)index + 1;
    return MZ_OK;
}

static mz_code recall(machine *m, int bytes) {
    uint64_t index;
    mz_code code = operand(m, bytes, &index);
    if (code)
        return code;
    if (index >= m->memos || !m->memo[index])
        return bad(m, "a memory that was never set");
    return push(m, m->memo[index]);
}

static mz_code push_text(machine *m, mz_value_type type, int bytes) {
    uint64_t length;
    mz_code code = operand(m, bytes, &length);
    return code ? code : push_bytes(m, type, length);
}

static mz_code push_mark(machine *m) {
    if (!mz_grow((void **)&m->mark, &m->mark_room, m->marks + 1, sizeof *m->mark))
        return full(m);
    m->mark[m->marks++] = m->depth;
    return MZ_OK;
}

static mz_code marked_tuple(machine *m) {
    if (m->marks == 0)
        return bad(m, "a mark is missing");
    return push_tuple(m, m->depth - m->mark[--m->marks]);
}

static mz_code push_plain(machine *m, mz_value_type type, int64_t whole) {
    mz_value *value = push_new(m, type);
    if (!value)
        return m->err->code;
    if (type == MZ_VALUE_BOOL)
        value->whole = whole;
    return MZ_OK;
}

/* Operations that build containers and plain values. */
static mz_code build_step(machine *m, unsigned char op) {
    switch (op) {
    case 'N':
        return push_plain(m, MZ_VALUE_NONE, 0);
    case 0x88:
    case 0x89:
        return push_plain(m, MZ_VALUE_BOOL, op == 0x88);
    case '}':
        return push_plain(m, MZ_VALUE_DICT, 0);
    case ']':
    case ')':
        return push_plain(m, MZ_VALUE_LIST, 0);
    case '(':
        return push_mark(m);
    case 't':
        return marked_tuple(m);
    case 0x85:
    case 0x86:
    case 0x87:
        return push_tuple(m, (size_t)op - 0x84);
    case 'a':
        return append_top(m, MZ_VALUE_LIST, 1);
    case 's':
        return append_top(m, MZ_VALUE_DICT, 2);
    case 'e':
        return append_marked(m, MZ_VALUE_LIST);
    case 'u':
        return append_marked(m, MZ_VALUE_DICT);
    case 'X':
        return push_text(m, MZ_VALUE_TEXT, 4);
    case 0x8c:
        return push_text(m, MZ_VALUE_TEXT, 1);
    case 0x8d:
        return push_text(m, MZ_VALUE_TEXT, 8);
    case 'C':
        return push_text(m, MZ_VALUE_BYTES, 1);
    case 'B':
        return push_text(m, MZ_VALUE_BYTES, 4);
    case 0x8e:
        return push_text(m, MZ_VALUE_BYTES, 8);
    default:
        return mz_fail(m->err, MZ_EINPUT,
                       "%s: pickle byte %lld: operation 0x%02x is not read (a set, an object, or "
                       "no pickle at all)",
                       mz_datafile_path(m->file), (long long)(m->p - m->begin - 1), op);
    }
}

static mz_code step(machine *m, unsigned char op) {
    uint64_t number;
    mz_code code;
    switch (op) {
    case 'K':
    case 'M':
    case 'J':
    case 'G':
    case 0x8a:
        return push_number(m, op);
    case 'q':
    case 'r':
        code = operand(m, op == 'q' ? 1 : 4, &number);
        return code ? code : remember(m, number);
    case 0x94:
        return remember(m, m->memos);
    case 'h':
        return recall(m, 1);
    case 'j':
        return recall(m, 4);
    case 'c':
        return named_global(m);
    case 0x93:
        return stacked_global(m);
    case 'Q':
        return push_storage(m);
    case 'R':
        return reduce(m);
    case 'b':
        return build(m);
    case 0x95: /* a frame: only a hint how to read */
        return operand(m, 8, &number);
    default:
        return build_step(m, op);
    }
}

static mz_code run(machine *m, mz_value **value) {
    uint64_t number;
    mz_code code = MZ_OK;
    if (m->end - m->p < 2 || m->p[0] != 0x80)
        return bad(m, "not a pickle of protocol 2 or later");
    m->p++;
    code = operand(m, 1, &number);
    if (!code && (number < 2 || number > 5))
        return bad(m, "not a pickle of protocol 2 to 5");
    while (!code) {
        if (m->p == m->end)
            return bad(m, "the pickle ends without its stop mark");
        unsigned char op = *m->p++;
        if (op == '.')
            break;
        code = step(m, op);
    }
    if (code)
        return code;
    if (m->depth != 1 || m->marks != 0)
        return bad(m, "the pickle does not leave one value");
    *value = m->stack[0];
    return MZ_OK;
}

mz_code mz_pickle_read(const mz_datafile *file, const unsigned char *data, size_t size,
                       mz_storage_place place, void *context, mz_arena *arena, mz_value **value,
                       mz_err *err) {
    machine m = {.file = file,
                 .begin = data,
                 .p = data,
                 .end = data + size,
                 .place = place,
                 .context = context,
                 .arena = arena,
                 .err = err};
    mz_code code = run(&m, value);
    free(m.stack);
    free(m.memo);
    free(m.mark);
    return code;
}

mz_value *mz_value_get(const mz_value *value, const char *key) {
    if (!value || value->type != MZ_VALUE_DICT)
        return NULL;
    for (uint32_t i = value->count; i >= 2; i -= 2)
        if (value->item[i - 2]->type == MZ_VALUE_TEXT && !strcmp(value->item[i - 2]->text, key))
            return value->item[i - 1];
    return NULL;
}

bool mz_value_int(const mz_value *value, int64_t *whole) {
    if (!value || value->type != MZ_VALUE_INT)
        return false;
    *whole = value->whole;
    return true;
}

/* ---- torch.save ------------------------------------------------------------------------------ */

static const int64_t PICKLE_MAX = (int64_t)512 << 20;

/* The pickled number that the form before the zip began with. */
static const unsigned char old_magic[] = {0x80, 2,    0x8a, 10,   0x6c, 0xfc, 0x9c,
                                          0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19};

bool mz_torch_head(const unsigned char *head, size_t size) {
    if (size >= sizeof old_magic && memcmp(head, old_magic, sizeof old_magic) == 0)
        return true;
    if (size < 30 || memcmp(head, "PK\3\4", 4) != 0)
        return false;
    size_t name = mz_le16(head + 26);
    return name <= size - 30 && memmem(head + 30, name, "/data.pkl", 9) != NULL;
}

static mz_code place_storage(void *context, const char *key, int64_t bytes, int64_t *offset,
                             mz_err *err) {
    const mz_zip *zip = context;
    char name[80];
    snprintf(name, sizeof name, "data/%.60s", key);
    const mz_zip_member *member = mz_zip_find(zip, name);
    if (!member)
        return mz_fail(err, MZ_EINPUT, "%s: the storage %s is not in the file",
                       mz_datafile_path(zip->file), name);
    mz_code code = mz_zip_place(zip, member, offset, err);
    if (!code && member->size < bytes)
        return mz_fail(err, MZ_EINPUT, "%s: %s has %lld bytes, but its tensor needs %lld",
                       mz_datafile_path(zip->file), name, (long long)member->size,
                       (long long)bytes);
    return code;
}

static mz_code check_order(const mz_zip *zip, mz_err *err) {
    char text[8] = "";
    int64_t offset;
    const mz_zip_member *member = mz_zip_find(zip, "byteorder");
    if (!member) /* versions before 2.1: always that of the machine, which was little-endian */
        return MZ_OK;
    mz_code code = mz_zip_place(zip, member, &offset, err);
    if (!code && member->size < (int64_t)sizeof text)
        code = mz_datafile_read(zip->file, offset, text, (size_t)member->size, err);
    if (!code && strcmp(text, "little") != 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: written on a big-endian machine; save it again on a little-endian one",
                       mz_datafile_path(zip->file));
    return code;
}

static mz_code read_value(mz_torch_file *torch, mz_zip *zip, mz_err *err) {
    int64_t offset;
    const mz_zip_member *member = mz_zip_find(zip, "data.pkl");
    if (!member)
        return mz_fail(err, MZ_EINPUT, "%s: a zip file, but not of torch.save: no data.pkl in it",
                       mz_datafile_path(torch->file));
    mz_code code = mz_zip_place(zip, member, &offset, err);
    if (!code)
        code = check_order(zip, err);
    if (!code && member->size > PICKLE_MAX)
        return mz_fail(err, MZ_EINPUT, "%s: data.pkl is larger than 512 MiB",
                       mz_datafile_path(torch->file));
    if (code)
        return code;
    unsigned char *bytes = malloc((size_t)member->size + 1);
    if (!bytes)
        return mz_fail_nomem(err, "the pickle of a torch file");
    code = mz_datafile_read(torch->file, offset, bytes, (size_t)member->size, err);
    if (!code)
        code = mz_pickle_read(torch->file, bytes, (size_t)member->size, place_storage, zip,
                              &torch->arena, &torch->value, err);
    free(bytes);
    return code;
}

mz_code mz_torch_open(const char *path, mz_torch_file *torch, mz_err *err) {
    unsigned char head[sizeof old_magic] = {0};
    mz_zip zip = {0};
    *torch = (mz_torch_file){0};
    mz_code code = mz_datafile_open(path, &torch->file, err);
    if (code)
        return code;
    int64_t size = mz_datafile_size(torch->file);
    code = mz_datafile_read(torch->file, 0, head,
                            size < (int64_t)sizeof head ? (size_t)size : sizeof head, err);
    if (!code && memcmp(head, old_magic, sizeof head) == 0)
        return mz_fail(err, MZ_EINPUT,
                       "%s: written by PyTorch before 1.6 (or with "
                       "_use_new_zipfile_serialization=False), a form that cannot be read without "
                       "running code; load and save it with a newer PyTorch",
                       path);
    if (!code)
        code = mz_zip_open(torch->file, &zip, err);
    if (!code)
        code = read_value(torch, &zip, err);
    mz_zip_close(&zip);
    return code;
}

void mz_torch_close(mz_torch_file *torch) {
    mz_datafile_close(&torch->file);
    mz_arena_free(&torch->arena);
    torch->value = NULL;
}

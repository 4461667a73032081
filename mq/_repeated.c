/* Messages of tensors and arrays like those of a message before: see mq/repeated.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "_plain.h"
#include "_repeated.h"

#define ALIGNMENT 64        /* mq.frames.ALIGNMENT */
#define INLINE (120 * 1024) /* mq.mesh.large.INLINE_BYTES */
#define MOST_TENSORS 16     /* mq.repeated.MOST_TENSORS */

static const unsigned char TABLED[4] = {'M', 'Q', 1, 1}; /* mq.frames.TABLED */
#define TABLE_BYTES 12      /* prefix and two numbers */
#define LONGEST_HEADER 4096 /* mq.repeated.LONGEST_HEADER */
#define MOST_HEADER (2 * LARGE) /* a skeleton, and a number for each tensor in it */
#define ARRAY 16            /* mq.extensions */
#define SCALAR 17
#define TENSOR 18

static PyObject *tensor_type, *strided, *array_type;
static PyObject *scalar_starts; /* by type, what is before the bytes of a scalar */
static PyObject *scalar_makers; /* by that, what makes one of its bytes */
static PyObject *bytes_of_tensor, *bytes_of_array; /* `Kind.buffer` of mq/repeated.py */
static PyObject *described_tensors, *described_arrays; /* by their descriptions */
static PyObject *tables; /* a list of registered types by type and by name: mq/safe_types.py */
static PyObject *attempt, *raised, *build, *fail; /* mq/foreign.py */
static PyObject *nothing; /* frozenset() */
static PyObject *str_code, *str_data, *str_data_ptr, *str_dtype, *str_is_conj, *str_is_contiguous, *str_is_cpu,
    *str_is_neg, *str_is_nested, *str_layout, *str_nbytes, *str_requires_grad, *str_shape,
    *str_untyped_storage;

/* One of the payload's: `view` is held until it is released, `values` are its own. */
typedef struct {
    PyObject *values;
    PyObject *key; /* what it must still have; NULL: nobody has changed it meanwhile */
    Py_buffer view;
    Py_ssize_t nbytes;
} Part;

/* Whether an attribute, or what a method returns, is this; -1: an exception. */
static int
is_so(PyObject *found, PyObject *wanted)
{
    if (found == NULL)
        return -1;
    Py_DECREF(found);
    return found == wanted;
}

/* Whether its bytes are sent as they lie there: `_key` of mq/tensors.py. */
static int
lies_ready(PyObject *tensor)
{
    int so = is_so(PyObject_GetAttr(tensor, str_layout), strided);
    if (so == 1)
        so = is_so(PyObject_GetAttr(tensor, str_requires_grad), Py_False);
    if (so == 1)
        so = is_so(PyObject_GetAttr(tensor, str_is_cpu), Py_True);
    if (so == 1)
        so = is_so(PyObject_GetAttr(tensor, str_is_nested), Py_False);
    if (so == 1)
        so = is_so(PyObject_CallMethodNoArgs(tensor, str_is_conj), Py_False);
    if (so == 1)
        so = is_so(PyObject_CallMethodNoArgs(tensor, str_is_neg), Py_False);
    if (so == 1)
        so = is_so(PyObject_CallMethodNoArgs(tensor, str_is_contiguous), Py_True);
    return so;
}

/* What the header depends on, a new reference; NULL without an exception: it is none. */
static PyObject *
key_of(Part *part)
{
    PyObject *values = part->values;
    if ((PyObject *)Py_TYPE(values) == tensor_type) {
        if (lies_ready(values) != 1)
            return NULL;
    } else if ((PyObject *)Py_TYPE(values) == array_type) {
        if (PyObject_GetBuffer(values, &part->view, PyBUF_C_CONTIGUOUS) < 0)
            return NULL;
    } else {
        return NULL;
    }
    PyObject *dtype = PyObject_GetAttr(values, str_dtype);
    PyObject *shape = dtype == NULL ? NULL : PyObject_GetAttr(values, str_shape);
    PyObject *key = shape == NULL ? NULL : PyTuple_Pack(2, dtype, shape);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    return key;
}

static uint64_t
u32(const unsigned char *place)
{
    return place[0] | place[1] << 8 | place[2] << 16 | (uint64_t)place[3] << 24;
}

static Py_ssize_t
u64(const unsigned char *place)
{
    uint64_t value = u32(place) | u32(place + 4) << 32;
    return value > PY_SSIZE_T_MAX / 2 ? -1 : (Py_ssize_t)value;
}

/* Whether the table of a header says that this buffer has so many bytes. */
static int
is_in_table(PyObject *header, Py_ssize_t n, Py_ssize_t nbytes)
{
    Py_ssize_t at = TABLE_BYTES + 8 * n;
    const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(header);
    return at + 8 <= PyBytes_GET_SIZE(header) && u64(bytes + at) == nbytes;
}

/* Where a tensor's bytes are; NULL: nowhere. */
static void *
place_of(PyObject *tensor)
{
    PyObject *pointer = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
    void *bytes = pointer == NULL ? NULL : PyLong_AsVoidPtr(pointer);
    Py_XDECREF(pointer);
    return bytes;
}

/* Whether its bytes are in the memory that it is a view of. */
static int
is_within(PyObject *tensor, Py_ssize_t nbytes)
{
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, str_untyped_storage);
    PyObject *number = storage == NULL ? NULL : PyObject_CallMethodNoArgs(storage, str_nbytes);
    Py_ssize_t of_all = number == NULL ? -1 : PyLong_AsSsize_t(number);
    const char *first = of_all < 0 ? NULL : place_of(storage);
    const char *bytes = first == NULL ? NULL : place_of(tensor);
    Py_XDECREF(storage);
    Py_XDECREF(number);
    return bytes != NULL && bytes >= first && nbytes <= of_all - (bytes - first);
}

/* Whether it still is what it was described as: code of the application's has run. The
   memory of an array is held. */
static int
is_as_before(const Part *part)
{
    if (part->key == NULL || part->view.obj != NULL)
        return 1;
    Part again = {.values = part->values};
    PyObject *key = key_of(&again);
    int so = key != NULL && PyObject_RichCompareBool(key, part->key, Py_EQ) == 1;
    Py_XDECREF(key);
    return so && is_within(part->values, part->nbytes);
}

/* Its bytes go to `place`, where there is so much room; how many; -1: it is another. */
static Py_ssize_t
put_bytes(const Part *part, char *place, Py_ssize_t room)
{
    if (part->view.obj != NULL) {
        if (!part->view.len || part->view.len > room)
            return -1;
        memcpy(place, part->view.buf, part->view.len);
        return part->view.len;
    }
    PyObject *number = is_as_before(part) ? PyObject_GetAttr(part->values, str_nbytes) : NULL;
    Py_ssize_t nbytes = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    if (nbytes <= 0 || nbytes > room)
        return -1;
    /* Last, for nothing may happen between the question and the copy. */
    void *bytes = place_of(part->values);
    if (bytes == NULL)
        return -1;
    memcpy(place, bytes, nbytes);
    return nbytes;
}

/* The message of this header and these parts; NULL without an exception: not that. */
static PyObject *
lay_out(PyObject *header, Py_ssize_t nbytes, const Part *parts, Py_ssize_t count)
{
    Py_ssize_t end = PyBytes_GET_SIZE(header);
    PyObject *area = end > nbytes ? NULL : PyBytes_FromStringAndSize(NULL, nbytes);
    if (area == NULL)
        return NULL;
    char *bytes = PyBytes_AS_STRING(area);
    memcpy(bytes, PyBytes_AS_STRING(header), end);
    for (Py_ssize_t n = 0; n < count; n++) {
        Py_ssize_t start = (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        Py_ssize_t put = start > nbytes ? -1 : put_bytes(&parts[n], bytes + start, nbytes - start);
        if (put < 0 || !is_in_table(header, n, put)) {
            Py_DECREF(area);
            return NULL;
        }
        memset(bytes + end, 0, start - end);
        end = start + put;
    }
    if (end != nbytes)
        Py_CLEAR(area);
    return area;
}

/* Its bytes where they are; NULL, perhaps with an exception: they are not its own. Torch
   gives those of another tensor, or of none, where a mode is on or there is no memory. */
static PyObject *
bytes_of(const Part *part)
{
    int is_array = part->view.obj != NULL;
    if (!is_as_before(part))
        return NULL;
    PyObject *bytes = PyObject_CallOneArg(is_array ? bytes_of_array : bytes_of_tensor, part->values);
    if (bytes != NULL
        && (!PyMemoryView_Check(bytes)
            || PyMemoryView_GET_BUFFER(bytes)->buf != (is_array ? part->view.buf : place_of(part->values))))
        Py_CLEAR(bytes);
    return bytes;
}

/* What `Frames` of mq/frames.py has of a larger one, of which nothing is copied. */
static PyObject *
refer(PyObject *header, Py_ssize_t nbytes, const Part *parts, Py_ssize_t count)
{
    Py_ssize_t end = PyBytes_GET_SIZE(header);
    PyObject *buffers = PyList_New(0);
    for (Py_ssize_t n = 0; buffers != NULL && n < count; n++) {
        PyObject *bytes = bytes_of(&parts[n]);
        Py_ssize_t size = bytes == NULL ? 0 : PyMemoryView_GET_BUFFER(bytes)->len;
        if (bytes == NULL || !is_in_table(header, n, size) || PyList_Append(buffers, bytes) < 0)
            Py_CLEAR(buffers);
        end = (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + size;
        Py_XDECREF(bytes);
    }
    PyObject *all = buffers == NULL || end != nbytes ? NULL : PyList_AsTuple(buffers);
    Py_XDECREF(buffers);
    return all == NULL ? NULL : Py_BuildValue("(ONnO)", header, all, nbytes, nothing);
}

static PyObject *
message_of(PyObject *header, Py_ssize_t nbytes, const Part *parts, Py_ssize_t count)
{
    return (nbytes > INLINE ? refer : lay_out)(header, nbytes, parts, count);
}

static PyObject *
known_message(PyObject *entry, const Part *parts, Py_ssize_t count)
{
    PyObject *header;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(entry, "Sn", &header, &nbytes))
        return NULL;
    return message_of(header, nbytes, parts, count);
}

/* Looks the parts up; `names` are those of a dict, which precede the keys there. */
static PyObject *
pack_parts(PyObject *headers, PyObject **names, Part *parts, Py_ssize_t count)
{
    PyObject *keys[2 * MOST_TENSORS], *key = NULL, *area = NULL;
    Py_ssize_t of_names = names == NULL ? 0 : count, known = 0;
    while (known < count && (keys[of_names + known] = key_of(&parts[known])) != NULL)
        known++;
    if (known == count) {
        if (names == NULL) {
            key = Py_NewRef(keys[0]);
        } else if ((key = PyTuple_New(2 * count)) != NULL) {
            memcpy(keys, names, count * sizeof *names);
            for (Py_ssize_t n = 0; n < 2 * count; n++)
                PyTuple_SET_ITEM(key, n, Py_NewRef(keys[n]));
        }
    }
    PyObject *entry = key == NULL ? NULL : PyDict_GetItemWithError(headers, key);
    if (entry != NULL) {
        Py_INCREF(entry);
        area = known_message(entry, parts, count);
        Py_DECREF(entry);
    }
    Py_XDECREF(key);
    while (known-- > 0)
        Py_DECREF(keys[of_names + known]);
    return area;
}

/* What cannot be packed so is left to the codec, which raises it again and says more. */
static PyObject *
area_or_none(PyObject *area)
{
    if (area != NULL)
        return area;
    if (PyErr_Occurred()) {
        /* Of any other kind it is most likely a signal handler's, and must not be lost. */
        PyObject *const kinds[] = {PyExc_AssertionError, PyExc_AttributeError, PyExc_ArithmeticError,
                                   PyExc_BufferError, PyExc_MemoryError, PyExc_RuntimeError,
                                   PyExc_TypeError, PyExc_ValueError, PyExc_Warning};
        int is_ours = 0;
        for (size_t n = 0; n < sizeof kinds / sizeof *kinds; n++)
            is_ours |= PyErr_ExceptionMatches(kinds[n]);
        if (!is_ours)
            return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

PyObject *
pack_repeated(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "pack_repeated(payload, headers)");
        return NULL;
    }
    Part parts[MOST_TENSORS] = {{NULL}};
    PyObject *names[MOST_TENSORS], *area = NULL;
    Py_ssize_t count = 0, at = 0;
    if (PyDict_CheckExact(args[0])) {
        PyObject *name, *values;
        int sound = PyDict_GET_SIZE(args[0]) <= MOST_TENSORS;
        while (sound && PyDict_Next(args[0], &at, &name, &values)) {
            sound = PyUnicode_CheckExact(name);
            names[count] = Py_NewRef(name);
            parts[count++].values = Py_NewRef(values);
        }
        if (sound && count)
            area = pack_parts(args[1], names, parts, count);
        for (Py_ssize_t n = 0; n < count; n++) {
            Py_DECREF(names[n]);
            Py_DECREF(parts[n].values);
        }
    } else {
        parts[count++].values = args[0];
        area = pack_parts(args[1], NULL, parts, count);
    }
    for (Py_ssize_t n = 0; n < count; n++)
        PyBuffer_Release(&parts[n].view);
    return area_or_none(area);
}

/* -- among other values ---------- */

struct Parts {
    PyObject *described;
    PyObject *needs; /* names of registered types; NULL: there are none */
    PyObject *made;  /* what `attempt` was asked for, and gave; NULL: it was not asked */
    int raised;      /* the exception is none of ours */
    Py_ssize_t count, room;
    Part *all, first[MOST_TENSORS];
};

static int
make_room(struct Parts *parts)
{
    if (parts->count < parts->room)
        return 0;
    Py_ssize_t room = 2 * parts->room;
    Part *all = PyMem_New(Part, room);
    if (all == NULL)
        return -1;
    memcpy(all, parts->all, parts->count * sizeof *all);
    if (parts->all != parts->first)
        PyMem_Free(parts->all);
    parts->all = all;
    parts->room = room;
    return 0;
}

static int
put_extension(Buffer *out, long code, const char *data, Py_ssize_t size)
{
    unsigned char *place = extend(out, MOST_BEFORE + size);
    if (place == NULL)
        return -1;
    int before = put_before(place, size, (int)code);
    memcpy(place + before, data, size);
    out->size -= MOST_BEFORE - before;
    return 0;
}

static Py_ssize_t
size_of(const Part *part)
{
    if (part->view.obj != NULL)
        return part->view.len;
    PyObject *number = PyObject_GetAttr(part->values, str_nbytes);
    Py_ssize_t nbytes = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    return nbytes;
}

/* A scalar of NumPy's, of whose type there was one before. */
static int
put_scalar(Buffer *out, PyObject *start, PyObject *value)
{
    Py_buffer view;
    if (!PyBytes_Check(start) || PyObject_GetBuffer(value, &view, PyBUF_SIMPLE) < 0)
        return -1;
    Py_ssize_t size = PyBytes_GET_SIZE(start);
    unsigned char *place = extend(out, MOST_BEFORE + size + view.len);
    if (place != NULL) {
        int before = put_before(place, size + view.len, SCALAR);
        memcpy(place + before, PyBytes_AS_STRING(start), size);
        memcpy(place + before + size, view.buf, view.len);
        out->size -= MOST_BEFORE - before;
        out->extended = 1;
    }
    PyBuffer_Release(&view);
    return place == NULL ? -1 : 0;
}

/* All attributes of an object, before any of them is encoded; NULL, perhaps with an
   exception: the twin says what is the matter. */
static PyObject *
values_of(PyObject *fields, PyObject *value)
{
    Py_ssize_t count = PyTuple_GET_SIZE(fields);
    if (PyTuple_Check(value))
        return PyTuple_GET_SIZE(value) == count ? PyTuple_GetSlice(value, 0, count) : NULL;
    PyObject *values = PyTuple_New(count);
    if (values != NULL && count)
        PyObject_GC_UnTrack(values); /* nobody may find it while some are missing */
    for (Py_ssize_t n = 0; values != NULL && n < count; n++) {
        PyObject *found = PyObject_GetAttr(value, PyTuple_GET_ITEM(fields, n));
        if (found == NULL)
            Py_CLEAR(values);
        else
            PyTuple_SET_ITEM(values, n, found);
    }
    if (values == NULL && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    if (values != NULL && count)
        PyObject_GC_Track(values);
    return values;
}

/* The state of an object that has these attributes, or of a tuple with these names. */
static int
put_fields(Buffer *out, PyObject *fields, PyObject *value, int levels)
{
    PyObject *values = levels < MOST_LEVELS ? values_of(fields, value) : NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(fields);
    int failed = values == NULL || put_count(out, count, 0x80, 0xde);
    for (Py_ssize_t n = 0; !failed && n < count; n++)
        failed = put_str(out, PyTuple_GET_ITEM(fields, n))
                 || put_value(out, PyTuple_GET_ITEM(values, n), levels + 1);
    Py_XDECREF(values);
    return failed;
}

/* What the function of its type makes of an object. That is kept for the twin: it is made
   once, also where the payload turns out to be left to that. */
static int
put_state(Buffer *out, PyObject *entry, PyObject *value, int levels)
{
    struct Parts *parts = out->parts;
    if (parts->made == NULL && (parts->made = PyList_New(0)) == NULL)
        return -1;
    PyObject *encode = PyTuple_GET_ITEM(entry, 2);
    PyObject *state = PyObject_CallFunctionObjArgs(attempt, encode, value, NULL);
    if (state == NULL) /* no `Raised`: a signal's handler has come before or after it */
        parts->raised = !PyErr_ExceptionMatches(PyExc_RecursionError)
                        && !PyErr_ExceptionMatches(PyExc_MemoryError);
    PyObject *done = state == NULL ? NULL : PyTuple_Pack(3, encode, value, state);
    int failed = done == NULL || PyList_Append(parts->made, done)
                 || (PyObject *)Py_TYPE(state) == raised || put_value(out, state, levels);
    Py_XDECREF(done);
    Py_XDECREF(state);
    return failed;
}

/* An object of a registered type. */
static int
put_object(Buffer *out, PyObject *entry, PyObject *value, int levels)
{
    struct Parts *parts = out->parts;
    if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 6 || levels >= MOST_LEVELS)
        return -1;
    if (parts->needs == NULL && (parts->needs = PySet_New(NULL)) == NULL)
        return -1;
    PyObject *name = PyTuple_GET_ITEM(entry, 0), *fields = PyTuple_GET_ITEM(entry, 5);
    size_t start = out->size;
    if (PySet_Add(parts->needs, name) || extend(out, MOST_BEFORE) == NULL || put_opcode(out, 0x92)
        || put_str(out, name))
        return -1;
    if (PyTuple_CheckExact(fields) ? put_fields(out, fields, value, levels + 1)
                                   : put_state(out, entry, value, levels + 1))
        return -1;
    end_extension(out, start, OBJECT);
    return 0;
}

static int
put_tensor(Buffer *out, PyObject *value)
{
    struct Parts *parts = out->parts;
    if (make_room(parts) < 0)
        return -1;
    Part *part = &parts->all[parts->count];
    *part = (Part){.values = value};
    PyObject *key = key_of(part);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(parts->described, key);
    Py_XINCREF(found);
    Py_ssize_t nbytes = found == NULL ? -1 : size_of(part);
    int failed = -1;
    if (nbytes > 0) {
        PyObject *code = PyObject_GetAttr(found, str_code);
        PyObject *data = code == NULL ? NULL : PyObject_GetAttr(found, str_data);
        if (data != NULL && PyLong_Check(code) && PyBytes_Check(data))
            failed = put_extension(out, PyLong_AsLong(code), PyBytes_AS_STRING(data),
                                   PyBytes_GET_SIZE(data));
        Py_XDECREF(code);
        Py_XDECREF(data);
    }
    Py_XDECREF(found);
    if (failed) {
        Py_XDECREF(key);
        PyBuffer_Release(&part->view);
        return -1;
    }
    out->extended = 1;
    part->key = key;
    part->values = Py_NewRef(value);
    part->nbytes = nbytes;
    parts->count++;
    return 0;
}

/* What a table has of a key, a new reference; NULL, perhaps with an exception: nothing. */
static PyObject *
look_up(PyObject *table, PyObject *key)
{
    if (table == NULL)
        return NULL;
    Py_INCREF(table);
    PyObject *found = PyDict_GetItemWithError(table, key);
    Py_XINCREF(found);
    Py_DECREF(table);
    return found;
}

/* The same of registered types, by type or by name. */
static PyObject *
look_up_type(int by_name, PyObject *key)
{
    PyObject *table = tables == NULL || PyList_GET_SIZE(tables) != 2 ? NULL : PyList_GET_ITEM(tables, by_name);
    return table == NULL || !PyDict_Check(table) ? NULL : look_up(table, key);
}

int
put_described(Buffer *out, PyObject *value, int levels)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type == tensor_type || type == array_type)
        return put_tensor(out, value);
    int failed = -1;
    PyObject *start = look_up(scalar_starts, type);
    PyObject *entry = start != NULL || PyErr_Occurred() ? NULL : look_up_type(0, type);
    if (start != NULL)
        failed = put_scalar(out, start, value);
    else if (entry != NULL)
        failed = put_object(out, entry, value, levels);
    Py_XDECREF(start);
    Py_XDECREF(entry);
    return failed;
}

static void
put_little_endian(char *place, uint64_t value, int nbytes)
{
    for (int n = 0; n < nbytes; n++, value >>= 8)
        place[n] = (char)value;
}

/* The header that `assemble` of mq/frames.py makes of a skeleton and its tensors. */
static PyObject *
header_of(const Buffer *skeleton, const struct Parts *parts)
{
    Py_ssize_t start = TABLE_BYTES + 8 * parts->count;
    PyObject *header = PyBytes_FromStringAndSize(NULL, start + skeleton->size);
    if (header == NULL)
        return NULL;
    char *bytes = PyBytes_AS_STRING(header);
    memcpy(bytes, TABLED, sizeof TABLED);
    put_little_endian(bytes + 4, skeleton->size, 4);
    put_little_endian(bytes + 8, parts->count, 4);
    for (Py_ssize_t n = 0; n < parts->count; n++)
        put_little_endian(bytes + TABLE_BYTES + 8 * n, parts->all[n].nbytes, 8);
    memcpy(bytes + start, skeleton->bytes, skeleton->size);
    return header;
}

/* The area, or what `Frames` begins with, also where something is asked of a receiver. */
static PyObject *
with_needs(PyObject *message, Py_ssize_t nbytes, PyObject *needs)
{
    PyObject *set = message == NULL ? NULL : PyFrozenSet_New(needs);
    PyObject *found = NULL;
    if (set != NULL && PyBytes_Check(message))
        found = Py_BuildValue("(O()nO)", message, nbytes, set);
    else if (set != NULL)
        found = Py_BuildValue("(OOnO)", PyTuple_GET_ITEM(message, 0), PyTuple_GET_ITEM(message, 1),
                              nbytes, set);
    Py_XDECREF(set);
    Py_XDECREF(message);
    return found;
}

static PyObject *
pack_skeleton(const Buffer *skeleton, const struct Parts *parts)
{
    PyObject *header = header_of(skeleton, parts);
    if (header == NULL)
        return NULL;
    Py_ssize_t nbytes = PyBytes_GET_SIZE(header);
    for (Py_ssize_t n = 0; n < parts->count; n++)
        nbytes = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + parts->all[n].nbytes;
    if (parts->needs == NULL) /* no code of the application's has run */
        for (Py_ssize_t n = 0; n < parts->count; n++)
            Py_CLEAR(parts->all[n].key);
    PyObject *message = message_of(header, nbytes, parts->all, parts->count);
    Py_DECREF(header);
    return parts->needs == NULL ? message : with_needs(message, nbytes, parts->needs);
}

PyObject *
pack_mixed(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "pack_mixed(payload, described)");
        return NULL;
    }
    struct Parts parts = {.described = args[1], .room = MOST_TENSORS};
    parts.all = parts.first;
    Buffer skeleton;
    begin(&skeleton, 0);
    skeleton.parts = &parts;
    PyObject *area = NULL;
    if (put_value(&skeleton, args[0], 0) == 0 && skeleton.extended && skeleton.size < LARGE)
        area = pack_skeleton(&skeleton, &parts);
    end(&skeleton);
    for (Py_ssize_t n = 0; n < parts.count; n++) {
        PyBuffer_Release(&parts.all[n].view);
        Py_XDECREF(parts.all[n].key);
        Py_DECREF(parts.all[n].values);
    }
    if (parts.all != parts.first)
        PyMem_Free(parts.all);
    Py_XDECREF(parts.needs);
    area = parts.raised ? NULL : area_or_none(area);
    if (area != Py_None || parts.made == NULL) {
        Py_XDECREF(parts.made);
        return area;
    }
    Py_DECREF(area);
    return parts.made;
}

/* -- the other way ---------- */

static PyObject *
aligned(Py_ssize_t nbytes)
{
    PyObject *memory = PyByteArray_FromStringAndSize(NULL, nbytes + ALIGNMENT);
    if (memory == NULL)
        return NULL;
    Py_ssize_t first = -(uintptr_t)PyByteArray_AS_STRING(memory) % ALIGNMENT;
    PyObject *whole = PyMemoryView_FromObject(memory);
    PyObject *start = PyLong_FromSsize_t(first), *stop = PyLong_FromSsize_t(first + nbytes);
    PyObject *slice = start == NULL || stop == NULL ? NULL : PySlice_New(start, stop, NULL);
    PyObject *area = slice == NULL || whole == NULL ? NULL : PyObject_GetItem(whole, slice);
    Py_DECREF(memory);
    Py_XDECREF(whole);
    Py_XDECREF(start);
    Py_XDECREF(stop);
    Py_XDECREF(slice);
    return area;
}

PyObject *
take_aligned(PyObject *module, PyObject *size)
{
    Py_ssize_t nbytes = PyLong_AsSsize_t(size);
    if (nbytes < 0 || nbytes > PY_SSIZE_T_MAX - ALIGNMENT)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    return aligned(nbytes);
}

static int
is_in_a_row(const Py_buffer *view)
{
    return view->itemsize == 1 && view->ndim == 1 && PyBuffer_IsContiguous(view, 'C');
}

/* As `header_bytes` of mq/frames.py, each number read once. */
static Py_ssize_t
header_bytes(const unsigned char *bytes, Py_ssize_t nbytes, uint64_t most)
{
    if (nbytes < TABLE_BYTES || memcmp(bytes, TABLED, sizeof TABLED) != 0)
        return 0;
    uint64_t count = u32(bytes + 8), end = TABLE_BYTES + 8 * count + u32(bytes + 4);
    return end <= most && end <= (uint64_t)nbytes ? (Py_ssize_t)end : 0;
}

/* What a part of `_Known` makes of its bytes. */
static PyObject *
make(PyObject *part, PyObject *area, PyObject *read_only)
{
    if (!PyTuple_Check(part) || PyTuple_GET_SIZE(part) != 3)
        return PyErr_Format(PyExc_TypeError, "a part is a maker, a start and a stop");
    PyObject *slice = PySlice_New(PyTuple_GET_ITEM(part, 1), PyTuple_GET_ITEM(part, 2), NULL);
    PyObject *bytes = slice == NULL ? NULL : PyObject_GetItem(area, slice);
    Py_XDECREF(slice);
    PyObject *args[] = {bytes, read_only};
    PyObject *made = NULL;
    if (bytes != NULL)
        made = PyObject_Vectorcall(PyTuple_GET_ITEM(part, 0), args, 2, NULL);
    Py_XDECREF(bytes);
    return made;
}

/* The one value, or the dict of these names. */
static PyObject *
make_all(PyObject *names, PyObject *parts, PyObject *area, PyObject *read_only)
{
    if (names == Py_None)
        return make(PyList_GET_ITEM(parts, 0), area, read_only);
    PyObject *payload = PyDict_New();
    for (Py_ssize_t n = 0; payload != NULL && n < PyList_GET_SIZE(parts); n++) {
        PyObject *made = make(PyList_GET_ITEM(parts, n), area, read_only);
        if (made == NULL || PyDict_SetItem(payload, PyList_GET_ITEM(names, n), made) < 0)
            Py_CLEAR(payload);
        Py_XDECREF(made);
    }
    return payload;
}

/* The same area, or of a read-only one a copy. `view` is held. */
static PyObject *
own(PyObject *area, const Py_buffer *view)
{
    if (!view->readonly)
        return Py_NewRef(area);
    PyObject *copy = aligned(view->len);
    if (copy != NULL)
        memcpy(PyMemoryView_GET_BUFFER(copy)->buf, view->buf, view->len);
    return copy;
}

static PyObject *
unpack_known(PyObject *whole, const Py_buffer *view, PyObject *known, PyObject *read_only)
{
    Py_ssize_t end = is_in_a_row(view) ? header_bytes(view->buf, view->len, LONGEST_HEADER) : 0;
    if (!end)
        Py_RETURN_NONE;
    PyObject *key = PyBytes_FromStringAndSize(view->buf, end);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(known, key);
    Py_XDECREF(key);
    if (found == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    Py_INCREF(found);
    Py_ssize_t nbytes;
    PyObject *names, *parts, *area = NULL, *payload = NULL;
    if (PyArg_ParseTuple(found, "nOO!", &nbytes, &names, &PyList_Type, &parts)) {
        if (nbytes != view->len || !PyList_GET_SIZE(parts))
            payload = Py_NewRef(Py_None);
        else
            area = own(whole, view);
        if (area != NULL)
            payload = make_all(names, parts, area, read_only);
        Py_XDECREF(area);
    }
    Py_DECREF(found);
    return payload;
}

PyObject *
unpack_repeated(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyMemoryView_Check(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "unpack_repeated(area, known, read_only)");
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_FULL_RO) < 0)
        return NULL;
    PyObject *payload = unpack_known(args[0], &view, args[1], args[2]);
    PyBuffer_Release(&view);
    return payload;
}

/* Tensors among other values: those of a message, in the order of its buffers. */
struct Tensors {
    PyObject *area, *read_only;
    PyObject *made; /* for what `build` gives; NULL: objects are left to the twin */
    int raised;     /* the exception is what that raised */
    Py_ssize_t count, taken, end;
    const unsigned char *sizes;
};

/* What makes a tensor of this description, and of how many bytes; a new reference. */
static PyObject *
maker_of(const unsigned char *body, Py_ssize_t size, int code, Py_ssize_t *nbytes)
{
    PyObject *known = code == TENSOR  ? described_tensors
                      : code == ARRAY ? described_arrays
                                      : NULL;
    PyObject *key = known == NULL ? NULL : PyBytes_FromStringAndSize((const char *)body, size);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(known, key);
    PyObject *maker = NULL;
    if (found != NULL && PyArg_ParseTuple(found, "nO", nbytes, &maker))
        Py_INCREF(maker);
    Py_XDECREF(key);
    return maker;
}

static PyObject *
take_tensor(struct Tensors *tensors, const unsigned char *body, uint64_t size, int code)
{
    if (tensors->taken == tensors->count)
        return NULL;
    Py_ssize_t nbytes = 0;
    Py_ssize_t start = (tensors->end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    PyObject *maker = maker_of(body, (Py_ssize_t)size, code, &nbytes);
    PyObject *made = NULL;
    if (maker != NULL && nbytes == u64(tensors->sizes + 8 * tensors->taken)) {
        tensors->taken++;
        tensors->end = start + nbytes;
        PyObject *part = Py_BuildValue("(Onn)", maker, start, tensors->end);
        if (part != NULL && tensors->end <= PyMemoryView_GET_BUFFER(tensors->area)->len)
            made = make(part, tensors->area, tensors->read_only);
        Py_XDECREF(part);
    }
    Py_XDECREF(maker);
    return made;
}

/* A scalar of NumPy's: a list of its dtype's name, which is short, and of its bytes. */
static PyObject *
take_scalar(const unsigned char *body, uint64_t size)
{
    uint64_t start = size < 4 || body[0] != 0x92 || (body[1] & 0xe0) != 0xa0 ? 0 : 4 + (body[1] & 0x1f);
    if (!start || start > size || body[start - 2] != 0xc4 || body[start - 1] != size - start)
        return NULL;
    PyObject *key = PyBytes_FromStringAndSize((const char *)body, start);
    PyObject *maker =
        key == NULL || scalar_makers == NULL ? NULL : PyDict_GetItemWithError(scalar_makers, key);
    Py_XINCREF(maker);
    Py_XDECREF(key);
    PyObject *bytes =
        maker == NULL ? NULL : PyBytes_FromStringAndSize((const char *)body + start, size - start);
    PyObject *made = bytes == NULL ? NULL : PyObject_CallOneArg(maker, bytes);
    Py_XDECREF(maker);
    Py_XDECREF(bytes);
    return made;
}

/* Whether a dict has these keys and no others; -1: an exception. */
static int
has_keys(PyObject *state, PyObject *keys)
{
    int so = PyDict_CheckExact(state) && PyDict_GET_SIZE(state) == PyTuple_GET_SIZE(keys);
    for (Py_ssize_t n = 0; so == 1 && n < PyTuple_GET_SIZE(keys); n++)
        so = PyDict_Contains(state, PyTuple_GET_ITEM(keys, n));
    return so;
}

/* An object of its fields, by its constructor. */
static PyObject *
build_of_fields(PyObject *entry, PyObject *state)
{
    PyObject *none = PyTuple_New(0);
    PyObject *made = none == NULL ? NULL : PyObject_Call(PyTuple_GET_ITEM(entry, 1), none, state);
    Py_XDECREF(none);
    if (made != NULL)
        return made;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    made = PyObject_CallFunctionObjArgs(fail, entry, error, NULL); /* it raises */
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return made;
}

/* An object of a registered type: a list of its name and of its state. */
static PyObject *
take_object(Source *body, int levels)
{
    struct Tensors *tensors = body->tensors;
    if (tensors->made == NULL || levels >= MOST_LEVELS || body->at == body->end || *body->at++ != 0x92)
        return NULL;
    PyObject *name = take_value(body, levels, 1);
    PyObject *entry = name == NULL || !PyUnicode_CheckExact(name) ? NULL : look_up_type(1, name);
    PyObject *state = entry == NULL ? NULL : take_value(body, levels + 1, 0);
    PyObject *made = NULL;
    if (state != NULL && body->at == body->end) {
        int is_simple = PyTuple_Check(entry) && PyTuple_GET_SIZE(entry) == 6
                        && PyTuple_CheckExact(PyTuple_GET_ITEM(entry, 5));
        if (is_simple)
            is_simple = has_keys(state, PyTuple_GET_ITEM(entry, 5));
        if (is_simple >= 0) {
            made = is_simple ? build_of_fields(entry, state)
                             : PyObject_CallFunctionObjArgs(build, entry, state, NULL);
            tensors->raised = made == NULL;
        }
        if (made != NULL && PyList_Append(tensors->made, made) < 0)
            Py_CLEAR(made);
    }
    Py_XDECREF(name);
    Py_XDECREF(entry);
    Py_XDECREF(state);
    return made;
}

PyObject *
take_described(Source *in, uint64_t size, int levels)
{
    if (in->tensors == NULL || (uint64_t)(in->end - in->at) < size + 1)
        return NULL;
    int code = *in->at++;
    Source body = {in->at, in->at + size, in->tensors};
    in->at += size;
    return code == ORDERED_DICT ? take_ordered(&body, levels)
           : code == TUPLE      ? take_tuple(&body, levels)
           : code == OBJECT     ? take_object(&body, levels)
           : code == SCALAR     ? take_scalar(body.at, size)
                                : take_tensor(in->tensors, body.at, size, code);
}

static PyObject *
unpack_header(const unsigned char *bytes, Py_ssize_t end, const Py_buffer *view, struct Tensors *tensors)
{
    tensors->count = u32(bytes + 8);
    tensors->end = end;
    tensors->sizes = bytes + TABLE_BYTES;
    /* No code of the application's runs for what is no message. */
    for (Py_ssize_t n = 0; n < tensors->count; n++) {
        Py_ssize_t size = u64(tensors->sizes + 8 * n);
        end = (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        if (size < 0 || size > view->len - end)
            return NULL;
        end += size;
    }
    Source in = {bytes + TABLE_BYTES + 8 * tensors->count, bytes + tensors->end, tensors};
    PyObject *payload = end != view->len ? NULL : take_value(&in, 0, 0);
    if (payload != NULL && (in.at != in.end || tensors->taken != tensors->count))
        Py_CLEAR(payload);
    return payload;
}

/* NULL, perhaps with an exception: it is left to the twin. */
static PyObject *
unpack_described(PyObject *whole, const Py_buffer *view, struct Tensors *tensors)
{
    if (!is_in_a_row(view))
        return NULL;
    /* Of a copy: who shares the memory may write to it meanwhile. */
    unsigned char first[1024], *bytes = first;
    Py_ssize_t copied = view->len < (Py_ssize_t)sizeof first ? view->len : (Py_ssize_t)sizeof first;
    memcpy(bytes, view->buf, copied);
    Py_ssize_t end = header_bytes(bytes, view->len, MOST_HEADER);
    if (!end)
        return NULL;
    if (end > copied) {
        bytes = PyMem_Malloc(end);
        if (bytes == NULL)
            return NULL;
        memcpy(bytes, first, copied); /* what has been looked at */
        memcpy(bytes + copied, (const char *)view->buf + copied, end - copied);
    }
    tensors->area = own(whole, view);
    PyObject *payload = tensors->area == NULL ? NULL : unpack_header(bytes, end, view, tensors);
    Py_XDECREF(tensors->area);
    if (bytes != first)
        PyMem_Free(bytes);
    return payload;
}

PyObject *
unpack_mixed(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 2 || nargs > 3 || !PyMemoryView_Check(args[0])
        || (nargs == 3 && args[2] != Py_None && !PyList_CheckExact(args[2]))) {
        PyErr_SetString(PyExc_TypeError, "unpack_mixed(area, read_only, made=None)");
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_FULL_RO) < 0)
        return NULL;
    struct Tensors tensors = {.read_only = args[1]};
    if (nargs == 3 && args[2] != Py_None)
        tensors.made = args[2];
    PyObject *payload = unpack_described(args[0], &view, &tensors);
    PyBuffer_Release(&view);
    return tensors.raised ? NULL : area_or_none(payload);
}

/* Whether every byte is 0 or 1. */
PyObject *
are_bools(PyObject *module, PyObject *memory)
{
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const unsigned char *bytes = view.buf;
    unsigned char all = 0;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t n = 0; n < view.len; n++)
        all |= bytes[n];
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&view);
    return PyBool_FromLong(all <= 1);
}

PyObject *
know_objects(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "know_objects(tables, attempt, raised, build, fail)");
        return NULL;
    }
    Py_XSETREF(tables, Py_NewRef(args[0]));
    Py_XSETREF(attempt, Py_NewRef(args[1]));
    Py_XSETREF(raised, Py_NewRef(args[2]));
    Py_XSETREF(build, Py_NewRef(args[3]));
    Py_XSETREF(fail, Py_NewRef(args[4]));
    Py_RETURN_NONE;
}

PyObject *
know_tensors(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "know_tensors(type, strided, described, bytes_of)");
        return NULL;
    }
    Py_XSETREF(tensor_type, Py_NewRef(args[0]));
    Py_XSETREF(strided, Py_NewRef(args[1]));
    Py_XSETREF(described_tensors, Py_NewRef(args[2]));
    Py_XSETREF(bytes_of_tensor, Py_NewRef(args[3]));
    Py_RETURN_NONE;
}

PyObject *
know_arrays(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyDict_Check(args[1]) || !PyDict_Check(args[3]) || !PyDict_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "know_arrays(type, described, bytes_of, starts, makers)");
        return NULL;
    }
    Py_XSETREF(array_type, Py_NewRef(args[0]));
    Py_XSETREF(described_arrays, Py_NewRef(args[1]));
    Py_XSETREF(bytes_of_array, Py_NewRef(args[2]));
    Py_XSETREF(scalar_starts, Py_NewRef(args[3]));
    Py_XSETREF(scalar_makers, Py_NewRef(args[4]));
    Py_RETURN_NONE;
}

int
intern_repeated(void)
{
    return (nothing = PyFrozenSet_New(NULL)) != NULL
           && (str_code = PyUnicode_InternFromString("code")) != NULL
           && (str_data = PyUnicode_InternFromString("data")) != NULL
           && (str_data_ptr = PyUnicode_InternFromString("data_ptr")) != NULL
           && (str_dtype = PyUnicode_InternFromString("dtype")) != NULL
           && (str_is_conj = PyUnicode_InternFromString("is_conj")) != NULL
           && (str_is_contiguous = PyUnicode_InternFromString("is_contiguous")) != NULL
           && (str_is_cpu = PyUnicode_InternFromString("is_cpu")) != NULL
           && (str_is_neg = PyUnicode_InternFromString("is_neg")) != NULL
           && (str_is_nested = PyUnicode_InternFromString("is_nested")) != NULL
           && (str_layout = PyUnicode_InternFromString("layout")) != NULL
           && (str_nbytes = PyUnicode_InternFromString("nbytes")) != NULL
           && (str_requires_grad = PyUnicode_InternFromString("requires_grad")) != NULL
           && (str_shape = PyUnicode_InternFromString("shape")) != NULL
           && (str_untyped_storage = PyUnicode_InternFromString("untyped_storage")) != NULL;
}

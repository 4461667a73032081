/* The hottest functions of the library, compiled: mq/speed.py says which, and what stands
   in for them where there was no compiler. Each does what its twin in Python does; the
   tests run both.

   Nothing here runs code of Python's between looking at something and changing it, so
   what is done under the interpreter lock is done in one step: whatever may allocate an
   object that the garbage collector knows, and so run a finalizer, comes before. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "_alone.h"
#include "_copying.h"
#include "_lock.h"
#include "_passing.h"
#include "_plain.h"
#include "_repeated.h"
#include "_spinning.h"

static const char PREFIX[4] = {'M', 'Q', 1, 0}; /* mq.frames.PLAIN */

/* -- plain messages: encoding ---------- */

int
grow(Buffer *out, size_t more)
{
    if (out->size + more > LARGE)
        return -1;
    size_t room = out->room * 2;
    while (room < out->size + more)
        room *= 2;
    unsigned char *bytes = PyMem_Malloc(room);
    if (bytes == NULL)
        return -1;
    memcpy(bytes, out->bytes, out->size);
    if (out->bytes != out->first)
        PyMem_Free(out->bytes);
    out->bytes = bytes;
    out->room = room;
    return 0;
}

static inline void
put_big_endian(unsigned char *place, uint64_t value, int nbytes)
{
    for (int n = nbytes; n-- > 0; value >>= 8)
        place[n] = (unsigned char)value;
}

static int
put_number(Buffer *out, unsigned char opcode, uint64_t value, int nbytes)
{
    unsigned char *place = extend(out, 1 + nbytes);
    if (place == NULL)
        return -1;
    place[0] = opcode;
    put_big_endian(place + 1, value, nbytes);
    return 0;
}

static int
put_int(Buffer *out, PyObject *value)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow > 0) {
        unsigned long long large = PyLong_AsUnsignedLongLong(value);
        if (large == (unsigned long long)-1 && PyErr_Occurred()) {
            PyErr_Clear();
            return -1;
        }
        return put_number(out, 0xcf, large, 8);
    }
    if (overflow < 0)
        return -1;
    if (number >= -32 && number < 128)
        return put_number(out, (unsigned char)number, 0, 0);
    if (number >= 0) {
        if (number <= UINT8_MAX)
            return put_number(out, 0xcc, number, 1);
        if (number <= UINT16_MAX)
            return put_number(out, 0xcd, number, 2);
        if (number <= UINT32_MAX)
            return put_number(out, 0xce, number, 4);
        return put_number(out, 0xcf, number, 8);
    }
    if (number >= INT8_MIN)
        return put_number(out, 0xd0, (uint64_t)number, 1);
    if (number >= INT16_MIN)
        return put_number(out, 0xd1, (uint64_t)number, 2);
    if (number >= INT32_MIN)
        return put_number(out, 0xd2, (uint64_t)number, 4);
    return put_number(out, 0xd3, (uint64_t)number, 8);
}

int
put_opcode(Buffer *out, unsigned char opcode)
{
    return put_number(out, opcode, 0, 0);
}

int
put_str(Buffer *out, PyObject *value)
{
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == NULL) {
        PyErr_Clear(); /* lone surrogates: the twin says which */
        return -1;
    }
    int failed;
    if (size < 32)
        failed = put_number(out, 0xa0 | (unsigned char)size, 0, 0);
    else if (size <= UINT8_MAX)
        failed = put_number(out, 0xd9, size, 1);
    else if (size <= UINT16_MAX)
        failed = put_number(out, 0xda, size, 2);
    else
        return -1;
    unsigned char *place = failed ? NULL : extend(out, size);
    if (place == NULL)
        return -1;
    memcpy(place, text, size);
    return 0;
}

static int
put_leaf(Buffer *out, PyObject *value, int levels)
{
    if (PyUnicode_CheckExact(value))
        return put_str(out, value);
    if (PyLong_CheckExact(value))
        return put_int(out, value);
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return put_number(out, 0xcb, bits, 8);
    }
    if (value == Py_None)
        return put_number(out, 0xc0, 0, 0);
    if (value == Py_False)
        return put_number(out, 0xc2, 0, 0);
    if (value == Py_True)
        return put_number(out, 0xc3, 0, 0);
    return out->parts == NULL ? -1 : put_described(out, value, levels);
}

int
put_count(Buffer *out, Py_ssize_t count, unsigned char few, unsigned char many)
{
    if (count < 16)
        return put_number(out, few | (unsigned char)count, 0, 0);
    return count <= UINT16_MAX ? put_number(out, many, count, 2) : -1;
}

static int
put_bytes(Buffer *out, PyObject *value)
{
    Py_ssize_t size = PyBytes_GET_SIZE(value);
    int failed = size <= UINT8_MAX    ? put_number(out, 0xc4, size, 1)
                 : size <= UINT16_MAX ? put_number(out, 0xc5, size, 2)
                                      : -1;
    unsigned char *place = failed ? NULL : extend(out, size);
    if (place == NULL)
        return -1;
    memcpy(place, PyBytes_AS_STRING(value), size);
    return 0;
}

/* What describes a tensor, or encodes an object, may be Python's, and change what it is
   in: left to the twin if it does. */
static int
put_list(Buffer *out, PyObject *list, int levels)
{
    Py_ssize_t count = PyList_GET_SIZE(list);
    int failed = put_count(out, count, 0x90, 0xdc);
    for (Py_ssize_t n = 0; !failed && n < count; n++) {
        PyObject *value = Py_NewRef(PyList_GET_ITEM(list, n));
        failed = put_value(out, value, levels);
        Py_DECREF(value);
        if (PyList_GET_SIZE(list) != count)
            failed = -1;
    }
    return failed;
}

static int
put_key(Buffer *out, PyObject *key)
{
    struct Parts *parts = out->parts;
    out->parts = NULL;
    int failed = put_leaf(out, key, 0);
    out->parts = parts;
    return failed;
}

static int
put_dict(Buffer *out, PyObject *dict, int levels)
{
    PyObject *key, *value;
    Py_ssize_t at = 0, count = PyDict_GET_SIZE(dict), n = 0;
    int failed = put_count(out, count, 0x80, 0xde);
    for (; !failed && PyDict_Next(dict, &at, &key, &value); n++) {
        Py_INCREF(value);
        failed = put_key(out, key) < 0 ? -1 : put_value(out, value, levels);
        Py_DECREF(value);
        if (PyDict_GET_SIZE(dict) != count)
            failed = -1;
    }
    return n == count ? failed : -1;
}

/* The attribute of a state_dict that load_state_dict reads; NULL without an exception: it
   has none. */
static PyObject *
metadata_of(PyObject *mapping)
{
    PyObject *found = PyObject_GetAttrString(mapping, "_metadata");
    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_Clear();
    if (found == Py_None)
        Py_CLEAR(found);
    return found;
}

static int
put_pairs(Buffer *out, PyObject *items, int levels)
{
    Py_ssize_t count = PyList_GET_SIZE(items);
    int failed = put_count(out, 2 * count, 0x90, 0xdc);
    for (Py_ssize_t n = 0; !failed && n < count; n++) {
        PyObject *pair = PyList_GET_ITEM(items, n); /* the list is ours alone */
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2)
            return -1; /* of an `items` of its own */
        failed = put_key(out, PyTuple_GET_ITEM(pair, 0)) < 0
                     ? -1
                     : put_value(out, PyTuple_GET_ITEM(pair, 1), levels);
    }
    return failed;
}

void
end_extension(Buffer *out, size_t start, int code)
{
    size_t size = out->size - start - MOST_BEFORE;
    unsigned char *place = out->bytes + start;
    int before = put_before(place, size, code);
    memmove(place + before, place + MOST_BEFORE, size);
    out->size -= MOST_BEFORE - before;
    out->extended = 1;
}

/* Among tensors alone: it is an extension, of which there are none in plain data. Its
   order is not that of the dict that it is, too. */
static int
put_ordered(Buffer *out, PyObject *mapping, int levels)
{
    size_t start = out->size;
    PyObject *metadata = metadata_of(mapping);
    PyObject *items = PyErr_Occurred() ? NULL : PyMapping_Items(mapping);
    int failed = items == NULL || extend(out, MOST_BEFORE) == NULL
                 || put_number(out, metadata == NULL ? 0x91 : 0x92, 0, 0)
                 || put_pairs(out, items, levels)
                 || (metadata != NULL && put_value(out, metadata, levels));
    Py_XDECREF(items);
    Py_XDECREF(metadata);
    if (failed)
        return -1;
    end_extension(out, start, ORDERED_DICT);
    return 0;
}

static int
put_tuple(Buffer *out, PyObject *items, int levels)
{
    size_t start = out->size;
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    int failed = extend(out, MOST_BEFORE) == NULL || put_count(out, count, 0x90, 0xdc);
    for (Py_ssize_t n = 0; !failed && n < count; n++)
        failed = put_value(out, PyTuple_GET_ITEM(items, n), levels);
    if (failed)
        return -1;
    end_extension(out, start, TUPLE);
    return 0;
}

/* -1 without an exception: it is of a kind left to the twin. `levels` are around it. */
int
put_value(Buffer *out, PyObject *value, int levels)
{
    if (PyList_CheckExact(value))
        return levels < MOST_LEVELS ? put_list(out, value, levels + 1) : -1;
    if (PyDict_CheckExact(value))
        return levels < MOST_LEVELS ? put_dict(out, value, levels + 1) : -1;
    if (out->parts != NULL && PyTuple_CheckExact(value))
        return levels < MOST_LEVELS ? put_tuple(out, value, levels + 1) : -1;
    if (out->parts != NULL && PyODict_CheckExact(value))
        return levels < MOST_LEVELS ? put_ordered(out, value, levels + 1) : -1;
    return PyBytes_CheckExact(value) ? put_bytes(out, value) : put_leaf(out, value, levels);
}

/* The area of plain data; NULL without an exception: it is another payload. */
static PyObject *
plain_area(PyObject *payload)
{
    Buffer out;
    begin(&out, sizeof PREFIX);
    memcpy(out.bytes, PREFIX, sizeof PREFIX);
    PyObject *area = NULL;
    if (put_value(&out, payload, 0) == 0 && out.size < LARGE)
        area = PyBytes_FromStringAndSize((const char *)out.bytes, out.size);
    end(&out);
    return area;
}

static PyObject *
encode_plain(PyObject *module, PyObject *payload)
{
    PyObject *area = plain_area(payload);
    if (area == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return area;
}

/* -- plain messages: decoding ---------- */

/* Keys come again and again. What a slot holds is compared, never trusted. */
#define KEYS 512
#define LONGEST_KEY 32
static PyObject *known_keys[KEYS];

static inline uint64_t
big_endian(const unsigned char *place, int nbytes)
{
    uint64_t value = 0;
    for (int n = 0; n < nbytes; n++)
        value = value << 8 | place[n];
    return value;
}

static inline Py_ssize_t
left(const Source *in)
{
    return in->end - in->at;
}

/* A number of `nbytes` that is in the source; -1: it is cut off. */
static inline int
take_number(Source *in, int nbytes, uint64_t *value)
{
    if (left(in) < nbytes)
        return -1;
    *value = big_endian(in->at, nbytes);
    in->at += nbytes;
    return 0;
}

static PyObject *
take_str(Source *in, uint64_t size, int is_key)
{
    if ((uint64_t)left(in) < size)
        return NULL;
    const char *text = (const char *)in->at;
    in->at += size;
    PyObject **slot = NULL;
    if (is_key && size && size <= LONGEST_KEY) {
        uint32_t hash = 2166136261u; /* FNV-1a */
        for (uint64_t n = 0; n < size; n++)
            hash = (hash ^ (unsigned char)text[n]) * 16777619u;
        slot = &known_keys[hash % KEYS];
        if (*slot != NULL && (uint64_t)PyUnicode_GET_LENGTH(*slot) == size
            && memcmp(PyUnicode_1BYTE_DATA(*slot), text, size) == 0)
            return Py_NewRef(*slot);
    }
    PyObject *found = PyUnicode_DecodeUTF8(text, size, NULL);
    if (slot != NULL && found != NULL && PyUnicode_IS_ASCII(found))
        Py_XSETREF(*slot, Py_NewRef(found));
    return found;
}

static PyObject *
take_list(Source *in, uint64_t count, int levels)
{
    /* An element takes a byte at least: nobody makes us allocate more than that. */
    if (count > (uint64_t)left(in) || levels >= MOST_LEVELS)
        return NULL;
    PyObject *list = PyList_New(count);
    if (list == NULL)
        return NULL;
    PyObject_GC_UnTrack(list); /* nobody may find it while elements are missing */
    for (uint64_t n = 0; n < count; n++) {
        PyObject *value = take_value(in, levels + 1, 0);
        if (value == NULL) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, n, value);
    }
    PyObject_GC_Track(list);
    return list;
}

/* So many pairs into a mapping, whose reference is taken over; NULL: it is no more. */
static inline PyObject *
take_pairs(Source *in, uint64_t count, int levels, PyObject *mapping,
           int (*set)(PyObject *, PyObject *, PyObject *))
{
    for (uint64_t n = 0; mapping != NULL && n < count; n++) {
        PyObject *key = take_value(in, levels + 1, 1);
        PyObject *value = key == NULL ? NULL : take_value(in, levels + 1, 0);
        if (value == NULL || set(mapping, key, value) < 0)
            Py_CLEAR(mapping);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return mapping;
}

static PyObject *
take_dict(Source *in, uint64_t count, int levels)
{
    if (count > (uint64_t)left(in) / 2 || levels >= MOST_LEVELS)
        return NULL;
    return take_pairs(in, count, levels, PyDict_New(), PyDict_SetItem);
}

PyObject *
take_ordered(Source *body, int levels)
{
    if (left(body) < 2 || (*body->at != 0x91 && *body->at != 0x92) || levels >= MOST_LEVELS)
        return NULL;
    int has_metadata = *body->at++ == 0x92;
    uint64_t count = *body->at++;
    if (count == 0xdc || count == 0xdd) {
        if (take_number(body, count == 0xdc ? 2 : 4, &count) < 0)
            return NULL;
    } else if ((count ^= 0x90) > 0x0f) {
        return NULL;
    }
    if (count % 2)
        return NULL;
    PyObject *mapping = PyObject_CallNoArgs((PyObject *)&PyODict_Type);
    mapping = take_pairs(body, count / 2, levels, mapping, PyObject_SetItem);
    if (mapping != NULL && has_metadata) {
        PyObject *metadata = take_value(body, levels + 1, 0);
        if (metadata == NULL || PyObject_SetAttrString(mapping, "_metadata", metadata) < 0)
            Py_CLEAR(mapping);
        Py_XDECREF(metadata);
    }
    if (mapping != NULL && body->at != body->end)
        Py_CLEAR(mapping);
    return mapping;
}

PyObject *
take_tuple(Source *body, int levels)
{
    /* Only a list is one more level: of extensions in one another there would be no end. */
    int opcode = left(body) ? *body->at : 0;
    if ((opcode & 0xf0) != 0x90 && opcode != 0xdc && opcode != 0xdd)
        return NULL;
    PyObject *items = take_value(body, levels, 0);
    PyObject *found = items != NULL && body->at == body->end ? PyList_AsTuple(items) : NULL;
    Py_XDECREF(items);
    return found;
}

PyObject *
take_value(Source *in, int levels, int is_key)
{
    if (in->at == in->end)
        return NULL;
    unsigned char opcode = *in->at++;
    uint64_t number;
    if (opcode < 0x80 || opcode >= 0xe0)
        return PyLong_FromLong((signed char)opcode);
    if (opcode >= 0xa0 && opcode < 0xc0)
        return take_str(in, opcode & 0x1f, is_key);
    if (opcode < 0xa0) {
        if (is_key)
            return NULL;
        return opcode < 0x90 ? take_dict(in, opcode & 0x0f, levels)
                             : take_list(in, opcode & 0x0f, levels);
    }
    switch (opcode) {
    case 0xc0:
        return Py_NewRef(Py_None);
    case 0xc2:
        return Py_NewRef(Py_False);
    case 0xc3:
        return Py_NewRef(Py_True);
    case 0xcb: {
        double value;
        if (take_number(in, 8, &number) < 0)
            return NULL;
        memcpy(&value, &number, sizeof value);
        return PyFloat_FromDouble(value);
    }
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
        if (take_number(in, 1 << (opcode - 0xcc), &number) < 0)
            return NULL;
        return PyLong_FromUnsignedLongLong(number);
    case 0xd0:
        return take_number(in, 1, &number) < 0 ? NULL : PyLong_FromLong((int8_t)number);
    case 0xd1:
        return take_number(in, 2, &number) < 0 ? NULL : PyLong_FromLong((int16_t)number);
    case 0xd2:
        return take_number(in, 4, &number) < 0 ? NULL : PyLong_FromLong((int32_t)number);
    case 0xd3:
        return take_number(in, 8, &number) < 0
                   ? NULL
                   : PyLong_FromLongLong((int64_t)number);
    case 0xd9:
    case 0xda:
    case 0xdb:
        if (take_number(in, 1 << (opcode - 0xd9), &number) < 0)
            return NULL;
        return take_str(in, number, is_key);
    case 0xc4:
    case 0xc5:
    case 0xc6: {
        if (is_key || take_number(in, 1 << (opcode - 0xc4), &number) < 0
            || (uint64_t)left(in) < number)
            return NULL;
        PyObject *found = PyBytes_FromStringAndSize((const char *)in->at, number);
        in->at += number;
        return found;
    }
    case 0xdc:
    case 0xdd:
        if (is_key || take_number(in, 2 << (opcode - 0xdc), &number) < 0)
            return NULL;
        return take_list(in, number, levels);
    case 0xde:
    case 0xdf:
        if (is_key || take_number(in, 2 << (opcode - 0xde), &number) < 0)
            return NULL;
        return take_dict(in, number, levels);
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
        return is_key ? NULL : take_described(in, 1 << (opcode - 0xd4), levels);
    case 0xc7:
    case 0xc8:
    case 0xc9:
        if (is_key || take_number(in, 1 << (opcode - 0xc7), &number) < 0)
            return NULL;
        return take_described(in, number, levels);
    default:
        return NULL;
    }
}

/* The payload of a plain area; NULL without an exception: the twin is to decode it. */
static PyObject *
plain_payload(PyObject *area, Py_ssize_t *nbytes)
{
    Py_buffer view;
    if (PyObject_GetBuffer(area, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *payload = NULL;
    *nbytes = view.len;
    if (view.len > (Py_ssize_t)sizeof PREFIX
        && memcmp(view.buf, PREFIX, sizeof PREFIX) == 0) {
        Source in = {view.buf, (const unsigned char *)view.buf + view.len, NULL};
        in.at += sizeof PREFIX;
        payload = take_value(&in, 0, 0);
        if (payload != NULL && in.at != in.end)
            Py_CLEAR(payload);
        if (payload == NULL && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_MemoryError))
            PyErr_Clear(); /* text that is not UTF-8 */
    }
    PyBuffer_Release(&view);
    return payload;
}

static PyObject *
decode_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 7 || !PyType_Check(args[0]) || !PyLong_Check(args[4])
        || !PyTuple_Check(args[5]) || !PyList_Check(args[6])
        || !PyType_IsSubtype((PyTypeObject *)args[0], &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError,
                        "decode_run(type, topic, sender, incarnation, first, times, areas)");
        return NULL;
    }
    PyTypeObject *type = (PyTypeObject *)args[0];
    long long first = PyLong_AsLongLong(args[4]);
    if (first == -1 && PyErr_Occurred())
        return NULL;
    PyObject *times = args[5], *areas = args[6];
    PyObject *messages = PyList_New(0);
    if (messages == NULL)
        return NULL;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(areas) && n < PyTuple_GET_SIZE(times); n++) {
        Py_ssize_t nbytes;
        PyObject *area = Py_NewRef(PyList_GET_ITEM(areas, n));
        PyObject *payload = plain_payload(area, &nbytes);
        Py_DECREF(area);
        if (payload == NULL) {
            if (PyErr_Occurred())
                goto failed;
            break;
        }
        PyObject *sequence = PyLong_FromLongLong(first + n);
        PyObject *size = PyLong_FromSsize_t(nbytes);
        PyObject *message = sequence && size ? type->tp_alloc(type, 7) : NULL;
        if (message == NULL) {
            Py_DECREF(payload);
            Py_XDECREF(sequence);
            Py_XDECREF(size);
            goto failed;
        }
        PyTuple_SET_ITEM(message, 0, Py_NewRef(args[1]));
        PyTuple_SET_ITEM(message, 1, payload);
        PyTuple_SET_ITEM(message, 2, Py_NewRef(args[2]));
        PyTuple_SET_ITEM(message, 3, sequence);
        PyTuple_SET_ITEM(message, 4, Py_NewRef(args[3]));
        PyTuple_SET_ITEM(message, 5, Py_NewRef(PyTuple_GET_ITEM(times, n)));
        PyTuple_SET_ITEM(message, 6, size);
        int appended = PyList_Append(messages, message);
        Py_DECREF(message);
        if (appended < 0)
            goto failed;
    }
    return messages;
failed:
    Py_DECREF(messages);
    return NULL;
}

/* -- the gate ---------- */

typedef struct {
    PyObject_HEAD
    PyObject *log; /* of committed messages; NULL while it is closed */
    long long messages, nbytes, largest;
    double until;
} Gate;

/* Names of attributes, interned. */
static PyObject *str_closing, *str_forked, *str_lock, *str_locked, *str_popleft, *str_ready;

static inline int
has_room(const Gate *gate, double published_at, Py_ssize_t nbytes)
{
    return gate->log != NULL && PyList_GET_SIZE(gate->log) < gate->messages
           && published_at < gate->until && gate->nbytes > 0 && nbytes <= gate->largest;
}

static int
append(Gate *gate, PyObject *logged, Py_ssize_t nbytes)
{
    if (PyList_Append(gate->log, logged) < 0)
        return -1;
    gate->nbytes -= nbytes;
    return 0;
}

static PyObject *
new_logged(double published_at, PyObject *data)
{
    PyObject *stamp = PyFloat_FromDouble(published_at);
    PyObject *logged = stamp == NULL ? NULL : PyTuple_Pack(2, stamp, data);
    Py_XDECREF(stamp);
    return logged;
}

static PyObject *
gate_close(Gate *gate, PyObject *ignored)
{
    gate->messages = gate->nbytes = 0;
    gate->until = 0.0;
    Py_CLEAR(gate->log);
    Py_RETURN_NONE;
}

static PyObject *
gate_open(Gate *gate, PyObject *args)
{
    PyObject *log;
    long long messages, nbytes, largest;
    double until;
    if (!PyArg_ParseTuple(args, "O!LLdL", &PyList_Type, &log, &messages, &nbytes, &until,
                          &largest))
        return NULL;
    gate->messages = messages;
    gate->nbytes = nbytes;
    gate->until = until;
    gate->largest = largest;
    Py_XSETREF(gate->log, Py_NewRef(log)); /* last: it may run a finalizer */
    Py_RETURN_NONE;
}

static PyObject *
gate_admit(Gate *gate, PyObject *args)
{
    double published_at;
    PyObject *data;
    if (!PyArg_ParseTuple(args, "dS", &published_at, &data))
        return NULL;
    if (gate->log == NULL)
        Py_RETURN_FALSE;
    PyObject *logged = new_logged(published_at, data);
    if (logged == NULL)
        return NULL;
    int room = has_room(gate, published_at, PyBytes_GET_SIZE(data));
    int failed = room && append(gate, logged, PyBytes_GET_SIZE(data)) < 0;
    Py_DECREF(logged);
    return failed ? NULL : PyBool_FromLong(room);
}

static PyObject *
gate_publish(Gate *gate, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "publish(payload, lock)");
        return NULL;
    }
    if (gate->log == NULL)
        Py_RETURN_FALSE;
    PyObject *data = plain_area(args[0]);
    if (data == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_FALSE;
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double published_at = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    PyObject *logged = new_logged(published_at, data);
    PyObject *locked
        = logged == NULL ? NULL : PyObject_CallMethodNoArgs(args[1], str_locked);
    if (locked == NULL) {
        Py_DECREF(data);
        Py_XDECREF(logged);
        return NULL;
    }
    /* Nobody has the lock, and nobody gets it before this returns. */
    int room = locked == Py_False && has_room(gate, published_at, PyBytes_GET_SIZE(data));
    int failed = room && append(gate, logged, PyBytes_GET_SIZE(data)) < 0;
    Py_DECREF(locked);
    Py_DECREF(logged);
    Py_DECREF(data);
    return failed ? NULL : PyBool_FromLong(room);
}

static PyObject *
gate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, ""))
        return NULL;
    return type->tp_alloc(type, 0);
}

static int
gate_traverse(Gate *gate, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(gate));
    Py_VISIT(gate->log);
    return 0;
}

static void
gate_dealloc(Gate *gate)
{
    PyTypeObject *type = Py_TYPE(gate);
    PyObject_GC_UnTrack(gate);
    Py_CLEAR(gate->log);
    type->tp_free(gate);
    Py_DECREF(type);
}

static PyMethodDef gate_methods[] = {
    {"open", (PyCFunction)gate_open, METH_VARARGS, NULL},
    {"close", (PyCFunction)gate_close, METH_NOARGS, NULL},
    {"admit", (PyCFunction)gate_admit, METH_VARARGS, NULL},
    {"publish", (PyCFunction)(void (*)(void))gate_publish, METH_FASTCALL, NULL},
    {NULL},
};

/* It holds a list of tuples of floats and bytes, which never refer to it: traversing is
   all that the garbage collector needs. */
static PyType_Slot gate_slots[] = {
    {Py_tp_new, gate_new},
    {Py_tp_dealloc, gate_dealloc},
    {Py_tp_traverse, gate_traverse},
    {Py_tp_methods, gate_methods},
    {0, NULL},
};

static PyType_Spec gate_spec = {
    .name = "mq._speed.Gate",
    .basicsize = sizeof(Gate),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = gate_slots,
};

/* -- the bell ---------- */

typedef struct {
    PyObject_HEAD
    int fd;
} Bell;

static PyObject *
bell_call(Bell *bell, PyObject *args, PyObject *kwargs)
{
    uint64_t one = 1;
    int before = errno;
    if (bell->fd >= 0 && write(bell->fd, &one, sizeof one) < 0)
        errno = before; /* it is full, and so readable anyway */
    Py_RETURN_NONE;
}

static PyObject *
bell_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, ""))
        return NULL;
    Bell *bell = (Bell *)type->tp_alloc(type, 0);
    if (bell != NULL)
        bell->fd = -1;
    return (PyObject *)bell;
}

static void
bell_dealloc(PyObject *bell)
{
    PyTypeObject *type = Py_TYPE(bell);
    type->tp_free(bell);
    Py_DECREF(type);
}

static PyMemberDef bell_members[] = {
    {"fd", T_INT, offsetof(Bell, fd), 0, NULL},
    {NULL},
};

static PyType_Slot bell_slots[] = {
    {Py_tp_new, bell_new},
    {Py_tp_call, bell_call},
    {Py_tp_dealloc, bell_dealloc},
    {Py_tp_members, bell_members},
    {0, NULL},
};

static PyType_Spec bell_spec = {
    .name = "mq._speed.Bell",
    .basicsize = sizeof(Bell),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = bell_slots,
};

/* -- messages that are ready ---------- */

/* Whether somebody has the queue's lock, or may not call it any more; -1 after an
   error. */
static int
is_busy(PyObject *lead)
{
    int busy = is_set(lead, str_closing);
    if (busy == 0)
        busy = is_set(lead, str_forked);
    if (busy != 0)
        return busy;
    PyObject *lock = PyObject_GetAttr(lead, str_lock);
    PyObject *locked = lock == NULL ? NULL : PyObject_CallMethodNoArgs(lock, str_locked);
    busy = locked == NULL ? -1 : PyObject_IsTrue(locked);
    Py_XDECREF(locked);
    Py_XDECREF(lock);
    return busy;
}

static PyObject *
pop_ready(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyList_CheckExact(args[2]) || PyList_GET_SIZE(args[2]) != 1) {
        PyErr_SetString(PyExc_TypeError, "pop_ready(lead, inbox, [None])");
        return NULL;
    }
    PyObject *ready = PyObject_GetAttr(args[1], str_ready);
    Py_ssize_t size = ready == NULL ? -1 : PyObject_Size(ready);
    int found = size > 1 && is_busy(args[0]) == 0;
    if (found) {
        PyObject *product = PyObject_CallMethodNoArgs(ready, str_popleft);
        if (product != NULL)
            PyList_SetItem(args[2], 0, product);
    }
    Py_XDECREF(ready);
    return PyErr_Occurred() ? NULL : Py_NewRef(found ? Py_True : Py_False);
}

static int
intern_names(void)
{
    return (str_closing = PyUnicode_InternFromString("closing")) != NULL
           && (str_forked = PyUnicode_InternFromString("forked")) != NULL
           && (str_lock = PyUnicode_InternFromString("lock")) != NULL
           && (str_locked = PyUnicode_InternFromString("locked")) != NULL
           && (str_popleft = PyUnicode_InternFromString("popleft")) != NULL
           && (str_ready = PyUnicode_InternFromString("ready")) != NULL;
}

/* -- the module ---------- */

static PyMethodDef methods[] = {
    {"encode_plain", encode_plain, METH_O, NULL},
    {"decode_run", (PyCFunction)(void (*)(void))decode_run, METH_FASTCALL, NULL},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, NULL},
    {"expect_copy", expect_copy, METH_O, NULL},
    {"fill", (PyCFunction)(void (*)(void))fill, METH_FASTCALL, NULL},
    {"follow", (PyCFunction)(void (*)(void))follow, METH_FASTCALL, NULL},
    {"pop_ready", (PyCFunction)(void (*)(void))pop_ready, METH_FASTCALL, NULL},
    {"hold_signals", hold_signals, METH_O, NULL},
    {"signal_waits", signal_waits, METH_NOARGS, NULL},
    {"has_other_locks", has_other_locks, METH_O, NULL},
    {"take_back", (PyCFunction)(void (*)(void))take_back, METH_FASTCALL, NULL},
    {"arrive_alone", (PyCFunction)(void (*)(void))arrive_alone, METH_FASTCALL, NULL},
    {"receive_passing", (PyCFunction)(void (*)(void))receive_passing, METH_FASTCALL, NULL},
    {"know_arrivals", (PyCFunction)(void (*)(void))know_arrivals, METH_FASTCALL, NULL},
    {"know_frames", know_frames, METH_O, NULL},
    {"send_alone", (PyCFunction)(void (*)(void))send_alone, METH_FASTCALL, NULL},
    {"take_alone", take_alone, METH_O, NULL},
    {"are_bools", are_bools, METH_O, NULL},
    {"know_arrays", (PyCFunction)(void (*)(void))know_arrays, METH_FASTCALL, NULL},
    {"know_objects", (PyCFunction)(void (*)(void))know_objects, METH_FASTCALL, NULL},
    {"know_tensors", (PyCFunction)(void (*)(void))know_tensors, METH_FASTCALL, NULL},
    {"take_aligned", take_aligned, METH_O, NULL},
    {"unpack_mixed", (PyCFunction)(void (*)(void))unpack_mixed, METH_FASTCALL, NULL},
    {"unpack_repeated", (PyCFunction)(void (*)(void))unpack_repeated, METH_FASTCALL, NULL},
    {"pack_mixed", (PyCFunction)(void (*)(void))pack_mixed, METH_FASTCALL, NULL},
    {"pack_repeated", (PyCFunction)(void (*)(void))pack_repeated, METH_FASTCALL, NULL},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mq._speed",
    .m_size = -1,
    .m_methods = methods,
};

static int
add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL || PyModule_AddObject(module, name, type) == 0)
        return type == NULL ? -1 : 0;
    Py_DECREF(type);
    return -1;
}

PyMODINIT_FUNC
PyInit__speed(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && intern_names() && intern_alone() && intern_repeated()
        && add_copying() == 0 && add_lock(module) == 0
#ifdef __linux__
        && add_type(module, "Spinner", &spinner_spec) == 0
#endif
        && add_type(module, "Gate", &gate_spec) == 0
        && add_type(module, "Bell", &bell_spec) == 0)
        return module;
    Py_XDECREF(module);
    return NULL;
}

/* A small message that somebody waits for, in a frame of its own: as it leaves, arrives
   and is taken.

   See `Session.send_alone`, `Reader` of mq/mesh/reader.py and `Inbox` of mq/mesh/inbox.py,
   which do all that is not as simple. What an interrupt could come into is Python's, and
   called before anything is done, or after all but the call of the link. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "_alone.h"

#define HEADER_BYTES 20 /* mq.mesh.wire.HEADER */
#define ALONE_BYTES 28  /* mq.mesh.wire.ALONE */
#define DATA 10         /* mq.mesh.wire.DATA */
#define MOST_BYTES (32 * 1024) /* mq.mesh.large.SMALL_BYTES */
#define ANSWER_FRAMES 64     /* mq.mesh.session.ANSWER_FRAMES */
#define ANSWER_SECONDS 0.001 /* mq.mesh.session.ANSWER_SECONDS */
#define MAX_SEQUENCE INT64_MAX

static PyTypeObject *run_type, *arrivals_type, *entry_type, *frame_type;
static PyObject *none_taken, *one_taken;
static PyObject *str__hand_over, *str__prepared, *str__taking, *str_active, *str_answer_at,
    *str_append, *str_areas, *str_arrivals, *str_batches_unanswered, *str_blocked, *str_busy,
    *str_chunk, *str_completes, *str_conn, *str_consumed_bytes, *str_consumed_messages,
    *str_copying, *str_counted, *str_fifo, *str_first, *str_flags, *str_forget_received,
    *str_frames, *str_granted_bytes, *str_granted_messages, *str_keep, *str_kind, *str_large,
    *str_late, *str_nbytes, *str_next, *str_number, *str_part, *str_parts, *str_popleft,
    *str_received, *str_received_bytes, *str_received_frames, *str_sent, *str_sent_before,
    *str_source, *str_sources, *str_stats, *str_subscription, *str_taken, *str_times,
    *str_touched, *str_try_send, *str_turn_nbytes, *str_unanswered;

/* `mq.mesh.wire.ALONE`, after the head of a frame. */
typedef struct {
    uint32_t subscription, nbytes;
    int64_t first;
    double published_at;
} Alone;

static int
parse(PyObject *head, Alone *alone)
{
    if (!PyBytes_CheckExact(head) || PyBytes_GET_SIZE(head) < HEADER_BYTES + ALONE_BYTES)
        return 0;
    const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(head) + HEADER_BYTES;
    uint64_t numbers[4] = {0};
    static const int sizes[] = {4, 4, 8, 8};
    for (int n = 0; n < 4; at += sizes[n++])
        for (int byte = sizes[n]; byte-- > 0;)
            numbers[n] = numbers[n] << 8 | at[byte];
    memcpy(&alone->published_at, &numbers[3], sizeof alone->published_at);
    alone->subscription = (uint32_t)numbers[0];
    alone->nbytes = at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
    alone->first = (int64_t)numbers[2];
    return numbers[1] == 1 && numbers[2] < MAX_SEQUENCE
           && PyBytes_GET_SIZE(head) - HEADER_BYTES - ALONE_BYTES == alone->nbytes;
}

/* Whether an attribute is this object; -1: an exception. */
static int
is_so(PyObject *owner, PyObject *name, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(owner, name);
    Py_XDECREF(found);
    return found == NULL ? -1 : found == wanted;
}

/* Whether a number is less than an attribute; -1: an exception. */
static int
is_below(long long number, PyObject *owner, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(owner, name);
    long long most = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return most == -1 && PyErr_Occurred() ? -1 : number < most;
}

/* The source that a frame is of, a new reference, where it takes all in order. */
static PyObject *
source_of(PyObject *by_id, PyObject *session, const Alone *alone)
{
    PyObject *id = PyLong_FromUnsignedLong(alone->subscription);
    /* Held, as what a lookup runs may let it go. */
    PyObject *known = id == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(by_id, id));
    Py_XDECREF(id);
    PyObject *sources = NULL;
    if (known != NULL && is_so(known, str_keep, Py_None) == 1)
        sources = PyObject_GetAttr(known, str_sources);
    Py_XDECREF(known);
    PyObject *source = sources == NULL ? NULL : PyDict_GetItemWithError(sources, session);
    Py_XINCREF(source);
    Py_XDECREF(sources);
    if (source != NULL && is_so(source, str_active, Py_True) != 1)
        Py_CLEAR(source);
    return source;
}

/* What comes after the newest that has arrived; NULL: it is not that, or has no credit. */
static PyObject *
next_state(PyObject *source, PyObject *arrivals, const Alone *alone)
{
    /* None before the publisher has answered. */
    PyObject *state = PyObject_Size(arrivals) > 0 ? PySequence_GetItem(arrivals, 0) : NULL;
    long long newest, messages, nbytes;
    int sound = state != NULL && PyArg_ParseTuple(state, "LLL", &newest, &messages, &nbytes)
                && newest == alone->first - 1
                && is_below(messages, source, str_granted_messages) == 1
                && is_below(nbytes, source, str_granted_bytes) == 1;
    Py_XDECREF(state);
    if (!sound)
        return NULL;
    PyObject *args = Py_BuildValue("((LLL))", alone->first, messages + 1, nbytes + alone->nbytes);
    state = args == NULL ? NULL : PyTuple_Type.tp_new(arrivals_type, args, NULL);
    Py_XDECREF(args);
    return state;
}

static int
set(PyObject *owner, PyObject *name, PyObject *value)
{
    int failed = value == NULL ? -1 : PyObject_SetAttr(owner, name, value);
    Py_XDECREF(value);
    return failed;
}

/* The message itself, read-only. */
static PyObject *
areas_of(PyObject *head)
{
    PyObject *whole = PyMemoryView_FromObject(head);
    PyObject *start = PyLong_FromLong(HEADER_BYTES + ALONE_BYTES);
    PyObject *slice = start == NULL ? NULL : PySlice_New(start, NULL, NULL);
    PyObject *area = slice == NULL || whole == NULL ? NULL : PyObject_GetItem(whole, slice);
    Py_XDECREF(whole);
    Py_XDECREF(start);
    Py_XDECREF(slice);
    return area == NULL ? NULL : Py_BuildValue("[N]", area);
}

/* `Run` of mq/mesh/incoming.py. */
static PyObject *
new_run(PyObject *source, PyObject *head, const Alone *alone)
{
    PyObject *run = run_type->tp_alloc(run_type, 0);
    if (run == NULL)
        return NULL;
    if (set(run, str_source, Py_NewRef(source)) < 0
        || set(run, str_first, PyLong_FromLongLong(alone->first)) < 0
        || set(run, str_times, Py_BuildValue("(d)", alone->published_at)) < 0
        || set(run, str_areas, areas_of(head)) < 0
        || set(run, str_nbytes, PyLong_FromUnsignedLong(alone->nbytes)) < 0
        || set(run, str_copying, Py_NewRef(Py_None)) < 0
        || set(run, str_taken, Py_NewRef(none_taken)) < 0
        || set(run, str_counted, Py_NewRef(none_taken)) < 0)
        Py_CLEAR(run);
    return run;
}

static int
append(PyObject *queue, PyObject *item)
{
    PyObject *done = PyObject_CallMethodOneArg(queue, str_append, item);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* -- the arrival ---------- */

/* What `Reader` keeps of the frames of a session, as it will be; and what is known. */
typedef struct {
    PyObject *received, *unanswered, *answer_at, *stats, *frames, *nbytes;
} Heard;

static void
forget(Heard *heard)
{
    Py_XDECREF(heard->received);
    Py_XDECREF(heard->unanswered);
    Py_XDECREF(heard->answer_at);
    Py_XDECREF(heard->stats);
    Py_XDECREF(heard->frames);
    Py_XDECREF(heard->nbytes);
}

/* A whole number that is an attribute; -1 with an exception. */
static long long
number_of(PyObject *owner, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(owner, name);
    long long number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

/* The sum of such an attribute and a number, a new reference. */
static PyObject *
sum(PyObject *owner, PyObject *name, long long more)
{
    long long number = number_of(owner, name);
    return number == -1 && PyErr_Occurred() ? NULL : PyLong_FromLongLong(number + more);
}

/* See to what the peer has received, as far as that may be news.

   Returns 0 with an exception, and without where it is more than was sent. */
static int
is_acknowledged(PyObject *session, uint64_t received, PyObject *now)
{
    long long newest = number_of(session, str_number);
    if (newest < 0 || received > (uint64_t)newest)
        return 0;
    PyObject *frames = PyObject_GetAttr(session, str_frames);
    Py_ssize_t size = frames == NULL ? -1 : PyObject_Size(frames);
    Py_XDECREF(frames);
    if (size <= 0)
        return size == 0;
    PyObject *number = PyLong_FromUnsignedLongLong(received);
    PyObject *args[] = {session, number, now};
    PyObject *done
        = number == NULL ? NULL : PyObject_VectorcallMethod(str_forget_received, args, 3, NULL);
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done != NULL;
}

/* What becomes of the session; 0: it is not as simple, or an exception. */
static int
hear(PyObject *session, PyObject *head, double now, Heard *heard)
{
    long long unanswered = number_of(session, str_unanswered);
    if (unanswered < 0 || unanswered + 1 >= ANSWER_FRAMES)
        return 0;
    PyObject *due = PyObject_GetAttr(session, str_answer_at);
    if (due == NULL)
        return 0;
    double answer_at = now + ANSWER_SECONDS;
    if (due != Py_None && !PyFloat_Check(due)) {
        Py_DECREF(due);
        return 0;
    }
    if (due != Py_None && PyFloat_AS_DOUBLE(due) < answer_at)
        answer_at = PyFloat_AS_DOUBLE(due);
    Py_DECREF(due);
    heard->answer_at = PyFloat_FromDouble(answer_at);
    heard->received = sum(session, str_received, 1);
    heard->unanswered = PyLong_FromLongLong(unanswered + 1);
    heard->stats = PyObject_GetAttr(session, str_stats);
    if (heard->stats != NULL) {
        heard->frames = sum(heard->stats, str_received_frames, 1);
        heard->nbytes = sum(heard->stats, str_received_bytes, PyBytes_GET_SIZE(head));
    }
    return heard->answer_at != NULL && heard->received != NULL && heard->unanswered != NULL
           && heard->frames != NULL && heard->nbytes != NULL;
}

static int
keep(PyObject *session, Heard *heard)
{
    return PyObject_SetAttr(session, str_received, heard->received) == 0
           && PyObject_SetAttr(session, str_unanswered, heard->unanswered) == 0
           && PyObject_SetAttr(session, str_answer_at, heard->answer_at) == 0
           && PyObject_SetAttr(heard->stats, str_received_frames, heard->frames) == 0
           && PyObject_SetAttr(heard->stats, str_received_bytes, heard->nbytes) == 0;
}

/* Whether it is the frame that comes next, of one message; -1: an exception. */
static int
is_next(PyObject *session, PyObject *head, uint64_t *received)
{
    const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(head);
    uint64_t number = 0;
    *received = 0;
    for (int byte = 8; byte-- > 0;) {
        number = number << 8 | at[4 + byte];
        *received = *received << 8 | at[12 + byte];
    }
    if (at[0] != DATA || at[1] != 0 || number == 0 || number > MAX_SEQUENCE)
        return 0;
    long long before = number_of(session, str_received);
    return before == -1 && PyErr_Occurred() ? -1 : (uint64_t)before + 1 == number;
}

PyObject *
arrive_alone(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 6 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "arrive_alone(by_id, limit, inbox, session, head, now)");
        return NULL;
    }
    PyObject *session = args[3], *head = args[4];
    Alone alone;
    uint64_t received;
    long long limit = PyLong_AsLongLong(args[1]);
    if (limit == -1 && PyErr_Occurred())
        return NULL;
    if (run_type == NULL || !parse(head, &alone) || alone.nbytes > limit)
        Py_RETURN_FALSE;
    double now = PyFloat_AsDouble(args[5]);
    int next = now == -1.0 && PyErr_Occurred() ? -1 : is_next(session, head, &received);
    if (next <= 0)
        return next < 0 ? NULL : Py_NewRef(Py_False);
    Heard heard = {NULL, NULL, NULL, NULL, NULL, NULL};
    PyObject *source = NULL, *arrivals = NULL, *state = NULL, *run = NULL, *fifo = NULL;
    int done = 0;
    if (hear(session, head, now, &heard)
        && (source = source_of(args[0], session, &alone)) != NULL
        && (arrivals = PyObject_GetAttr(source, str_arrivals)) != NULL
        && (state = next_state(source, arrivals, &alone)) != NULL
        && (run = new_run(source, head, &alone)) != NULL
        && is_acknowledged(session, received, args[5])
        && (fifo = PyObject_GetAttr(args[2], str_fifo)) != NULL)
        /* All or nothing: whatever may run code of Python's is done. */
        done = append(fifo, run) == 0 && append(arrivals, state) == 0 && keep(session, &heard);
    Py_XDECREF(source);
    Py_XDECREF(arrivals);
    Py_XDECREF(state);
    Py_XDECREF(run);
    Py_XDECREF(fifo);
    forget(&heard);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

/* -- who takes it ---------- */

/* Whether a run has one message, which is there and was not taken; its area, borrowed. */
static PyObject *
only_area(PyObject *run, PyObject *areas)
{
    if (areas == NULL || !PyList_CheckExact(areas) || PyList_GET_SIZE(areas) != 1
        || !PyMemoryView_Check(PyList_GET_ITEM(areas, 0)) || is_so(run, str_copying, Py_None) != 1
        || number_of(run, str_taken) != 0 || number_of(run, str_counted) != 0)
        return NULL;
    return PyList_GET_ITEM(areas, 0);
}

/* `Entry` of mq/mesh/incoming.py. */
static PyObject *
new_entry(PyObject *run, PyObject *source, PyObject *first, PyObject *area)
{
    PyObject *times = PyObject_GetAttr(run, str_times);
    PyObject *time = times == NULL ? NULL : PySequence_GetItem(times, 0);
    Py_XDECREF(times);
    PyObject *fields = time == NULL ? NULL : PyTuple_Pack(5, source, first, time, area, Py_False);
    Py_XDECREF(time);
    PyObject *args = fields == NULL ? NULL : PyTuple_Pack(1, fields);
    Py_XDECREF(fields);
    PyObject *entry = args == NULL ? NULL : PyTuple_Type.tp_new(entry_type, args, NULL);
    Py_XDECREF(args);
    return entry;
}

/* What the source and the counters become, and all but the last step; 0: an exception. */
static int
count(PyObject *inbox, PyObject *run, PyObject *source, PyObject *first, Py_ssize_t nbytes)
{
    PyObject *subscription = PyObject_GetAttr(source, str_subscription);
    PyObject *stats = subscription == NULL ? NULL : PyObject_GetAttr(subscription, str_stats);
    PyObject *touched = PyObject_GetAttr(inbox, str_touched);
    PyObject *taking = PyTuple_Pack(2, run, none_taken);
    PyObject *messages = sum(source, str_consumed_messages, 1);
    PyObject *bytes = sum(source, str_consumed_bytes, nbytes);
    PyObject *received = stats == NULL ? NULL : sum(stats, str_received, 1);
    PyObject *received_bytes = stats == NULL ? NULL : sum(stats, str_received_bytes, nbytes);
    int done = touched != NULL && taking != NULL && messages != NULL && bytes != NULL
               && received != NULL && received_bytes != NULL
               && PyObject_SetItem(touched, subscription, Py_None) == 0
               && PyObject_SetAttr(inbox, str__taking, taking) == 0
               && PyObject_SetAttr(run, str_taken, one_taken) == 0
               && PyObject_SetAttr(run, str_counted, one_taken) == 0
               && PyObject_SetAttr(source, str_consumed_messages, messages) == 0
               && PyObject_SetAttr(source, str_consumed_bytes, bytes) == 0
               && PyObject_SetAttr(source, str_taken, first) == 0
               && PyObject_SetAttr(stats, str_received, received) == 0
               && PyObject_SetAttr(stats, str_received_bytes, received_bytes) == 0
               && PyObject_SetAttr(inbox, str_counted, source) == 0;
    Py_XDECREF(subscription);
    Py_XDECREF(stats);
    Py_XDECREF(touched);
    Py_XDECREF(taking);
    Py_XDECREF(messages);
    Py_XDECREF(bytes);
    Py_XDECREF(received);
    Py_XDECREF(received_bytes);
    return done;
}

PyObject *
take_alone(PyObject *module, PyObject *inbox)
{
    PyObject *fifo = PyObject_GetAttr(inbox, str_fifo);
    PyObject *run = fifo != NULL && PyObject_Size(fifo) > 0 ? PySequence_GetItem(fifo, 0) : NULL;
    PyObject *areas = NULL, *source = NULL, *first = NULL, *entry = NULL, *area;
    if (run != NULL && run_type != NULL && Py_TYPE(run) == run_type
        && is_so(inbox, str__prepared, Py_None) == 1
        && (areas = PyObject_GetAttr(run, str_areas)) != NULL
        && (area = only_area(run, areas)) != NULL
        && (source = PyObject_GetAttr(run, str_source)) != NULL
        && (first = PyObject_GetAttr(run, str_first)) != NULL
        && (entry = new_entry(run, source, first, area)) != NULL) {
        if (count(inbox, run, source, first, PyObject_Size(area))) {
            PyObject *popped = PyObject_CallMethodNoArgs(fifo, str_popleft);
            Py_XDECREF(popped);
        }
    }
    Py_XDECREF(fifo);
    Py_XDECREF(run);
    Py_XDECREF(areas);
    Py_XDECREF(source);
    Py_XDECREF(first);
    if (PyErr_Occurred()) {
        Py_XDECREF(entry);
        return NULL;
    }
    return entry == NULL ? Py_NewRef(Py_None) : entry;
}

/* -- the departure ---------- */

static void
put(unsigned char *at, uint64_t number, int size)
{
    for (int byte = 0; byte < size; byte++)
        at[byte] = (unsigned char)(number >> 8 * byte);
}

int
is_set(PyObject *owner, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(owner, name);
    int set = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return set;
}

/* Whether nothing else is to be sent; 0 also with an exception. */
static int
is_all(PyObject *session, PyObject *frames, PyObject *feed)
{
    if (is_set(session, str_blocked) != 0 || is_set(session, str_busy) != 0
        || is_set(session, str_batches_unanswered) != 0
        || is_so(feed, str_keep, Py_None) != 1 || is_so(feed, str_late, Py_None) != 1)
        return 0;
    Py_ssize_t size = PyObject_Size(frames);
    return size >= 0 && number_of(session, str_sent) == size;
}

/* `Frame` of mq/mesh/frame.py, of one message. */
static PyObject *
new_frame(PyObject *number, PyObject *parts, PyObject *feed, PyObject *sequence)
{
    PyObject *frame = frame_type->tp_alloc(frame_type, 0);
    if (frame == NULL)
        return NULL;
    if (set(frame, str_kind, PyLong_FromLong(DATA)) < 0
        || set(frame, str_number, Py_NewRef(number)) < 0
        || set(frame, str_parts, Py_NewRef(parts)) < 0
        || set(frame, str_flags, Py_NewRef(none_taken)) < 0
        || set(frame, str_completes, Py_BuildValue("[(OO)]", feed, sequence)) < 0
        || set(frame, str_large, Py_NewRef(Py_None)) < 0
        || set(frame, str_chunk, Py_NewRef(none_taken)) < 0
        || set(frame, str_part, Py_NewRef(Py_None)) < 0
        || set(frame, str_turn_nbytes, Py_NewRef(none_taken)) < 0
        || set(frame, str_sent_before, Py_NewRef(Py_False)) < 0)
        Py_CLEAR(frame);
    return frame;
}

/* The head of a frame of one message, and apart what of it is sent again as it is. */
static PyObject *
new_head(long long number, long long received, const Alone *alone, PyObject *data,
         PyObject **parts)
{
    Py_ssize_t size = HEADER_BYTES + ALONE_BYTES + PyBytes_GET_SIZE(data);
    PyObject *head = PyBytes_FromStringAndSize(NULL, size);
    if (head == NULL)
        return NULL;
    unsigned char *at = (unsigned char *)PyBytes_AS_STRING(head);
    uint64_t published_at;
    memcpy(&published_at, &alone->published_at, sizeof published_at);
    put(at, DATA, 4); /* no flags, and zero */
    put(at + 4, (uint64_t)number, 8);
    put(at + 12, (uint64_t)received, 8);
    unsigned char *const run = at + HEADER_BYTES;
    put(run, alone->subscription, 4);
    put(run + 4, 1, 4);
    put(run + 8, (uint64_t)alone->first, 8);
    put(run + 16, published_at, 8);
    put(run + 24, alone->nbytes, 4);
    memcpy(run + ALONE_BYTES, PyBytes_AS_STRING(data), alone->nbytes);
    PyObject *front = PyBytes_FromStringAndSize((char *)run, ALONE_BYTES);
    *parts = front == NULL ? NULL : Py_BuildValue("[NO]", front, data);
    if (*parts == NULL)
        Py_CLEAR(head);
    return head;
}

/* Give the frame to the link, by what of `Session` sees to its faults; 0: an exception. */
static int
hand_over(PyObject *session, PyObject *conn, PyObject *frame, PyObject *head, PyObject *now)
{
    PyObject *send = PyObject_GetAttr(conn, str_try_send);
    PyObject *args[] = {session, send, head, Py_None, now};
    PyObject *taken
        = send == NULL ? NULL : PyObject_VectorcallMethod(str__hand_over, args, 5, NULL);
    Py_XDECREF(send);
    int accepted = taken == NULL ? -1 : PyObject_IsTrue(taken);
    Py_XDECREF(taken);
    if (accepted < 0)
        return 0;
    if (!accepted)
        return PyObject_SetAttr(session, str_blocked, Py_True) == 0;
    return PyObject_SetAttr(frame, str_sent_before, Py_True) == 0
           && set(session, str_sent, sum(session, str_sent, 1)) == 0;
}

/* Number, frame and queue it; NULL: an exception. */
static PyObject *
frame_next(PyObject *session, PyObject *frames, PyObject *feed, const Alone *alone,
           PyObject *sequence, PyObject *data, PyObject **head)
{
    long long received = number_of(session, str_received);
    if (received == -1 && PyErr_Occurred())
        return NULL;
    PyObject *parts = NULL, *frame = NULL, *next = NULL;
    PyObject *number = sum(session, str_number, 1);
    PyObject *unanswered = sum(session, str_batches_unanswered, 1);
    if (number != NULL && unanswered != NULL
        && (*head = new_head(PyLong_AsLongLong(number), received, alone, data, &parts)) != NULL
        && (next = PyLong_FromLongLong(alone->first + 1)) != NULL
        && (frame = new_frame(number, parts, feed, sequence)) != NULL
        && (append(frames, frame) < 0 || PyObject_SetAttr(session, str_number, number) < 0
            || PyObject_SetAttr(feed, str_next, next) < 0
            || PyObject_SetAttr(session, str_batches_unanswered, unanswered) < 0))
        Py_CLEAR(frame);
    Py_XDECREF(number);
    Py_XDECREF(unanswered);
    Py_XDECREF(parts);
    Py_XDECREF(next);
    return frame;
}

PyObject *
send_alone(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != 3) {
        PyErr_SetString(PyExc_TypeError, "send_alone(session, feed, message, now)");
        return NULL;
    }
    PyObject *session = args[0], *feed = args[1], *message = args[2];
    PyObject *data = PyTuple_GET_ITEM(message, 1), *sequence = PyTuple_GET_ITEM(message, 2);
    if (frame_type == NULL || !PyBytes_CheckExact(data) || PyBytes_GET_SIZE(data) > MOST_BYTES)
        Py_RETURN_FALSE;
    PyObject *conn = PyObject_GetAttr(session, str_conn);
    PyObject *frames = PyObject_GetAttr(session, str_frames);
    PyObject *frame = NULL, *head = NULL;
    int done = conn != NULL && frames != NULL && conn != Py_None
               && is_all(session, frames, feed);
    if (done) {
        Alone alone = {
            .subscription = (uint32_t)number_of(feed, str_subscription),
            .nbytes = (uint32_t)PyBytes_GET_SIZE(data),
            .first = PyLong_AsLongLong(sequence),
            .published_at = PyFloat_AsDouble(PyTuple_GET_ITEM(message, 0)),
        };
        if (!PyErr_Occurred())
            frame = frame_next(session, frames, feed, &alone, sequence, data, &head);
        if (frame != NULL)
            hand_over(session, conn, frame, head, args[3]);
    }
    Py_XDECREF(conn);
    Py_XDECREF(frames);
    Py_XDECREF(frame);
    Py_XDECREF(head);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

/* -- what it knows ---------- */

PyObject *
know_arrivals(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyType_Check(args[0]) || !PyType_Check(args[1]) || !PyType_Check(args[2])
        || !PyType_IsSubtype((PyTypeObject *)args[1], &PyTuple_Type)
        || !PyType_IsSubtype((PyTypeObject *)args[2], &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "know_arrivals(Run, Arrivals, Entry)");
        return NULL;
    }
    Py_XSETREF(run_type, (PyTypeObject *)Py_NewRef(args[0]));
    Py_XSETREF(arrivals_type, (PyTypeObject *)Py_NewRef(args[1]));
    Py_XSETREF(entry_type, (PyTypeObject *)Py_NewRef(args[2]));
    Py_RETURN_NONE;
}

PyObject *
know_frames(PyObject *module, PyObject *type)
{
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "know_frames(Frame)");
        return NULL;
    }
    Py_XSETREF(frame_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}

int
intern_alone(void)
{
    return (none_taken = PyLong_FromLong(0)) != NULL && (one_taken = PyLong_FromLong(1)) != NULL
           && (str__hand_over = PyUnicode_InternFromString("_hand_over")) != NULL
           && (str__prepared = PyUnicode_InternFromString("_prepared")) != NULL
           && (str__taking = PyUnicode_InternFromString("_taking")) != NULL
           && (str_active = PyUnicode_InternFromString("active")) != NULL
           && (str_answer_at = PyUnicode_InternFromString("answer_at")) != NULL
           && (str_append = PyUnicode_InternFromString("append")) != NULL
           && (str_areas = PyUnicode_InternFromString("areas")) != NULL
           && (str_arrivals = PyUnicode_InternFromString("arrivals")) != NULL
           && (str_batches_unanswered = PyUnicode_InternFromString("batches_unanswered")) != NULL
           && (str_blocked = PyUnicode_InternFromString("blocked")) != NULL
           && (str_busy = PyUnicode_InternFromString("busy")) != NULL
           && (str_chunk = PyUnicode_InternFromString("chunk")) != NULL
           && (str_completes = PyUnicode_InternFromString("completes")) != NULL
           && (str_conn = PyUnicode_InternFromString("conn")) != NULL
           && (str_consumed_bytes = PyUnicode_InternFromString("consumed_bytes")) != NULL
           && (str_consumed_messages = PyUnicode_InternFromString("consumed_messages")) != NULL
           && (str_copying = PyUnicode_InternFromString("copying")) != NULL
           && (str_counted = PyUnicode_InternFromString("counted")) != NULL
           && (str_fifo = PyUnicode_InternFromString("fifo")) != NULL
           && (str_first = PyUnicode_InternFromString("first")) != NULL
           && (str_flags = PyUnicode_InternFromString("flags")) != NULL
           && (str_forget_received = PyUnicode_InternFromString("forget_received")) != NULL
           && (str_frames = PyUnicode_InternFromString("frames")) != NULL
           && (str_granted_bytes = PyUnicode_InternFromString("granted_bytes")) != NULL
           && (str_granted_messages = PyUnicode_InternFromString("granted_messages")) != NULL
           && (str_keep = PyUnicode_InternFromString("keep")) != NULL
           && (str_kind = PyUnicode_InternFromString("kind")) != NULL
           && (str_large = PyUnicode_InternFromString("large")) != NULL
           && (str_late = PyUnicode_InternFromString("late")) != NULL
           && (str_nbytes = PyUnicode_InternFromString("nbytes")) != NULL
           && (str_next = PyUnicode_InternFromString("next")) != NULL
           && (str_number = PyUnicode_InternFromString("number")) != NULL
           && (str_part = PyUnicode_InternFromString("part")) != NULL
           && (str_parts = PyUnicode_InternFromString("parts")) != NULL
           && (str_popleft = PyUnicode_InternFromString("popleft")) != NULL
           && (str_received = PyUnicode_InternFromString("received")) != NULL
           && (str_received_bytes = PyUnicode_InternFromString("received_bytes")) != NULL
           && (str_received_frames = PyUnicode_InternFromString("received_frames")) != NULL
           && (str_sent = PyUnicode_InternFromString("sent")) != NULL
           && (str_sent_before = PyUnicode_InternFromString("sent_before")) != NULL
           && (str_source = PyUnicode_InternFromString("source")) != NULL
           && (str_sources = PyUnicode_InternFromString("sources")) != NULL
           && (str_stats = PyUnicode_InternFromString("stats")) != NULL
           && (str_subscription = PyUnicode_InternFromString("subscription")) != NULL
           && (str_taken = PyUnicode_InternFromString("taken")) != NULL
           && (str_times = PyUnicode_InternFromString("times")) != NULL
           && (str_touched = PyUnicode_InternFromString("touched")) != NULL
           && (str_try_send = PyUnicode_InternFromString("try_send")) != NULL
           && (str_turn_nbytes = PyUnicode_InternFromString("turn_nbytes")) != NULL
           && (str_unanswered = PyUnicode_InternFromString("unanswered")) != NULL;
}
